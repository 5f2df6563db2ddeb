"""Requests that can be found again: streams taken up at another gateway, states, cancels, idempotency keys."""

import asyncio
import random

import pytest

from service.errors import EndReason
from service.queue.interface import QueueUnavailable
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, QuickQueue, beside, open_gateway, speech
from tests.support.raw_http import RawClient

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "the and", "max_tokens": 60}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = "Hello 안녕 🙂 world, this is one long answer END and more"
SOON_S = 5.0


@pytest.fixture
async def pair(model_folder):
    """Two gateways on one queue."""
    async with open_gateway(model_folder) as one, beside(one, model_folder) as other:
        one.worker.script = lambda job: speech(one.model, TEXT)
        yield one, other


async def soon(condition):
    async with asyncio.timeout(SOON_S):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
        return found


async def stream(gateway, path, body, **headers):
    """Request id and all bytes of a stream."""
    async with gateway.http.post(gateway.url + path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        return response.headers["X-Request-Id"], await response.read()


async def resumed(gateway, request_id, after):
    headers = {"Last-Event-ID": str(after)}
    async with gateway.http.get(f"{gateway.url}/v1/requests/{request_id}", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return await response.read()


async def state_of(gateway, request_id, **how):
    return await gateway.get(f"/v1/requests/{request_id}", **how)


def last_id(data):
    """Number of the last event that came whole, and where it ends."""
    end = data.rfind(b"\n\n") + 2
    ids = [line[4:] for line in data[:end].split(b"\n") if line.startswith(b"id: ")]
    return (int(ids[-1]), end) if ids else (0, 0)


BODIES = {
    "chat": (CHAT, MESSAGES),
    "text": (COMPLETIONS, PROMPT),
    "stop": (COMPLETIONS, {**PROMPT, "stop": ["END"]}),
    "echo": (COMPLETIONS, {**PROMPT, "echo": True}),
    "usage": (CHAT, {**MESSAGES, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "logprobs": (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "text logprobs": (COMPLETIONS, {**PROMPT, "logprobs": 2}),
    "n": (CHAT, {**MESSAGES, "n": 3, "stop": "world"}),
    "best_of": (COMPLETIONS, {**PROMPT, "n": 2, "best_of": 3, "logprobs": 1}),
    "beams": (COMPLETIONS, {**PROMPT, "n": 2, "use_beam_search": True, "beam_width": 2}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_is_taken_up_elsewhere_byte_for_byte(pair, name):
    one, other = pair
    path, body = BODIES[name]
    request_id, whole = await stream(one, path, body)
    assert whole.endswith(b"data: [DONE]\n\n")
    num_events = whole.count(b"id: ")
    for after in range(num_events + 1):
        mark = whole.find(b"id: %d\n" % (after + 1)) if after < num_events else whole.find(b"data: [DONE]")
        assert await resumed(other, request_id, after) == whole[mark:]


async def test_a_stream_is_dropped_and_taken_up_while_it_runs(pair):
    one, other = pair
    one.worker.script = lambda job: speech(one.model, TEXT, step_s=0.002)
    chance = random.Random(5)
    for _ in range(5):
        body = {**PROMPT, "stream": True, "resumable": True}
        response = await one.http.post(one.url + COMPLETIONS, json=body)
        request_id, received = response.headers["X-Request-Id"], b""
        gateways = [other, one]
        while not received.endswith(b"data: [DONE]\n\n"):
            limit = len(received) + chance.randrange(1, 3000)
            async for data in response.content.iter_any():
                received += data
                if len(received) > limit:
                    break
            response.close()
            after, end = last_id(received)
            if received.endswith(b"data: [DONE]\n\n"):
                break
            received, gateways = received[:end], gateways[::-1]
            url = f"{gateways[0].url}/v1/requests/{request_id}"
            response = await one.http.get(url, headers={"Last-Event-ID": str(after)})
        assert received == await resumed(other, request_id, 0)
    assert one.worker.cancels == []


async def test_a_resumable_request_waits_for_its_client_and_then_ends(model_folder):
    async with open_gateway(model_folder, resume_grace=0.8) as gateway:
        gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
        client = await RawClient.connect(gateway.url)
        await client.post(CHAT, {**MESSAGES, "stream": True, "resumable": True})
        await client.read_until(b'"content":"H"')
        await client.reset()
        request_id = gateway.worker.jobs[0].job_id
        # A client watches again, for longer than the grace.
        async with gateway.http.get(f"{gateway.url}/v1/requests/{request_id}?stream=true") as response:
            await response.content.readuntil(b'"content":"H"')
            await asyncio.sleep(1.2)
            assert gateway.worker.cancels == []
        left_at_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(SOON_S):
            cancel = await gateway.worker.cancelled()
        assert cancel.reason is EndReason.CANCELLED
        assert asyncio.get_running_loop().time() - left_at_s > 0.4


async def test_without_a_word_a_request_ends_with_its_client(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
    client = await RawClient.connect(gateway.url)
    await client.post(CHAT, {**MESSAGES, "stream": True})
    await client.read_until(b'"content":"H"')
    await client.reset()
    async with asyncio.timeout(SOON_S):
        await gateway.worker.cancelled()

    async def is_cancelled():
        return (await state_of(gateway, gateway.worker.jobs[0].job_id))[1]["status"] == "cancelled"

    await soon(is_cancelled)


async def test_in_the_background(pair):
    one, other = pair
    one.worker.script = lambda job: speech(one.model, TEXT, step_s=0.002)
    body = {**MESSAGES, "background": True, "stop": "END"}
    async with one.http.post(one.url + CHAT, json=body) as response:
        assert response.status == 202
        state = await response.json()
        assert response.headers["Location"] == f"/v1/requests/{state['id']}"
    assert (state["object"], state["status"], state["response"], state["background"]) == (
        "request", "queued", None, True,
    )  # fmt: skip

    async def ended():
        status, found = await state_of(other, state["id"])
        assert status == 200
        return found if found["status"] == "completed" else None

    answer = (await soon(ended))["response"]
    assert answer["choices"][0]["message"]["content"] == TEXT.partition("END")[0]
    assert answer["id"] == f"chatcmpl-{state['id']}"
    async with asyncio.timeout(SOON_S):
        assert (await one.worker.cancelled()).reason is EndReason.STOP, "a stop string ends it though no client listens"
    assert (await state_of(other, answer["id"]))[1]["response"] == answer, "its OpenAI name is as good"


async def test_background_with_several_prompts(pair):
    one, other = pair
    _, state = await one.post(COMPLETIONS, {**PROMPT, "prompt": ["the", "and"], "n": 2, "background": True})

    async def ended():
        found = (await state_of(other, state["id"]))[1]
        return found if found["status"] == "completed" else None

    assert [choice["text"] for choice in (await soon(ended))["response"]["choices"]] == [TEXT] * 4
    headers = {"Last-Event-ID": "2"}
    status, answer = await state_of(other, state["id"], headers=headers)
    assert (status, answer["error"]["param"]) == (400, "Last-Event-ID")


async def test_states_and_cancel_from_elsewhere(pair):
    one, other = pair
    one.worker.script = lambda job: speech(one.model, "Hello", end=None)
    _, state = await one.post(CHAT, {**MESSAGES, "background": True})

    async def runs():
        return (await state_of(other, state["id"]))[1]["status"] == "in_progress"

    await soon(runs)
    async with other.http.delete(f"{other.url}/v1/requests/{state['id']}") as response:
        assert response.status == 200
        assert (await response.json())["status"] in ("cancelling", "cancelled")

    async def is_cancelled():
        return (await state_of(other, state["id"]))[1]

    while (found := await is_cancelled())["status"] != "cancelled":
        await asyncio.sleep(0.01)
    assert found["error"]["code"] == "cancelled"
    async with other.http.delete(f"{other.url}/v1/requests/{state['id']}") as response:
        assert (await response.json())["status"] == "cancelled", "a second time changes nothing"


async def test_a_failure_is_a_state(gateway):
    gateway.worker.script = lambda job: Script([], EndReason.NUMERICAL_ERROR)
    _, state = await gateway.post(CHAT, {**MESSAGES, "background": True})

    async def ended():
        found = (await state_of(gateway, state["id"]))[1]
        return found if found["status"] == "failed" else None

    assert (await soon(ended))["error"]["code"] == "numerical_error"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_requests_of_others_are_not_there(model_folder, method):
    async with open_gateway(model_folder, api_key=("mine", "yours")) as gateway:
        _, state = await gateway.post(CHAT, {**MESSAGES, "background": True}, headers={"Authorization": "Bearer mine"})

        async def ask(request_id, key):
            url = f"{gateway.url}/v1/requests/{request_id}"
            async with gateway.http.request(method, url, headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status, (await response.json()).get("error")

        assert (await ask(state["id"], "mine"))[0] == 200
        for request_id, key in ((state["id"], "yours"), ("NONE", "mine"), ("a%20b", "mine"), ("x" * 200, "mine")):
            status, error = await ask(request_id, key)
            assert (status, error["code"]) == (404, "request_not_found")


async def test_an_idempotency_key(pair):
    one, other = pair
    key = {"Idempotency-Key": "order-66"}
    _, first = await one.post(CHAT, MESSAGES, headers=key)
    _, again = await other.post(CHAT, {**MESSAGES, "seed": None}, headers=key)
    assert again == first
    assert len(one.worker.jobs) == 1
    for body in ({**MESSAGES, "seed": 1}, {**MESSAGES, "stream": True}):
        status, answer = await other.post(CHAT, body, headers=key)
        assert (status, answer["error"]["code"]) == (409, "idempotency_key_reused")
    status, answer = await other.post(COMPLETIONS, PROMPT, headers=key)
    assert status == 409
    _, another = await one.post(CHAT, MESSAGES, headers={"Idempotency-Key": "order-67"})
    assert another["id"] != first["id"]
    status, answer = await one.post(CHAT, MESSAGES, headers={"Idempotency-Key": "a b"})
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_stream_is_taken_up_by_sending_the_same_request_again(pair):
    one, other = pair
    key = {"Idempotency-Key": "k"}
    request_id, whole = await stream(one, CHAT, MESSAGES, **key)
    again_id, rest = await stream(other, CHAT, MESSAGES, **key, **{"Last-Event-ID": "4"})
    assert again_id == request_id
    assert rest == whole[whole.find(b"id: 5\n") :]
    assert len(one.worker.jobs) == 1


async def test_keys_of_two_tenants_are_two_keys(model_folder):
    async with open_gateway(model_folder, api_key=("mine", "yours")) as gateway:
        answers = [
            await gateway.post(CHAT, MESSAGES, headers={"Authorization": f"Bearer {key}", "Idempotency-Key": "k"})
            for key in ("mine", "yours")
        ]
        assert [status for status, _ in answers] == [200, 200]
        assert answers[0][1]["id"] != answers[1][1]["id"]


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "", "1" * 10])
async def test_an_event_id_that_is_none(gateway, text):
    _, answer = await gateway.post(CHAT, MESSAGES)
    status, refusal = await state_of(gateway, answer["id"], headers={"Last-Event-ID": text})
    assert (status, refusal["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**MESSAGES, "background": True, "stream": True}, "background"),
        (COMPLETIONS, {**PROMPT, "prompt": ["a", "b"], "resumable": True, "stream": True}, "resumable"),
    ],
)
async def test_what_cannot_be_had(gateway, path, body, param):
    status, answer = await gateway.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_what_stays_outlives_its_gateway(model_folder):
    async with open_gateway(model_folder) as gateway:
        gateway.worker.script = lambda job: speech(gateway.model, TEXT, step_s=0.005)
        async with beside(gateway, model_folder) as other:
            _, state = await other.post(CHAT, {**MESSAGES, "background": True})

        async def ended():
            found = (await state_of(gateway, state["id"]))[1]
            return found if found["status"] == "completed" else None

        answer = (await soon(ended))["response"]
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert gateway.worker.cancels == []


class Forgetful(QuickQueue):
    is_away = False

    def __init__(self):
        super().__init__()
        put_request = self.requests.put_request

        async def put_unless_away(record, *how):
            if self.is_away is None:
                raise QueueUnavailable("away")
            return await put_request(record, *how)

        self.requests.put_request = put_unless_away

    async def submit(self, job, *bounds):
        if self.is_away:
            raise QueueUnavailable("away")
        await super().submit(job, *bounds)


@pytest.mark.parametrize("away", [True, None])
@pytest.mark.parametrize("more", [{}, {"resumable": True}, {"background": True}])
async def test_a_queue_that_is_away(model_folder, away, more):
    queue = Forgetful()
    key = {} if away else {"headers": {"Idempotency-Key": "order-66"}}  # only then it is remembered before it is queued
    async with open_gateway(model_folder, queue) as gateway:
        queue.is_away = away
        status, answer = await gateway.post(CHAT, {**MESSAGES, **more}, **key)
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        queue.is_away = False
        assert (await gateway.post(CHAT, {**MESSAGES, **more}, **key))[0] in (200, 202)


async def test_the_numbers_of_kept_requests(gateway):
    await gateway.post(CHAT, {**MESSAGES, "resumable": True})

    async def counted():
        async with gateway.http.get(gateway.url + "/metrics") as response:
            text = await response.text()
        return "quire:open_requests 0.0" in text and text

    text = await soon(counted)
    assert 'quire:requests_ended_total{reason="stop"} 1.0' in text


@pytest.mark.parametrize("route", ["/v1/requests/{id}?stream=true", "/v1/responses/resp_{id}?stream=true"])
async def test_the_head_of_a_stream_has_no_body(gateway, route):
    """A body would be taken for the next response on the connection."""
    path, body = (CHAT, MESSAGES) if "requests" in route else ("/v1/responses", {"model": MODEL, "input": "hi"})
    async with gateway.http.post(gateway.url + path, json=body) as response:
        request_id = response.headers["X-Request-Id"]
    client = await RawClient.connect(gateway.url)
    head, live = route.replace("{id}", request_id), b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await client.send(f"HEAD {head} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() + live)
    status, headers, _ = await client.response()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    await client.close()


@pytest.mark.parametrize("route", ["/v1/requests/{id}", "/v1/responses/resp_{id}"])
async def test_a_value_of_stream_that_is_no_boolean_is_refused(gateway, route):
    path, body = (CHAT, MESSAGES) if "requests" in route else ("/v1/responses", {"model": MODEL, "input": "hi"})
    async with gateway.http.post(gateway.url + path, json=body) as response:
        route = route.replace("{id}", response.headers["X-Request-Id"])
    assert (await gateway.get(f"{route}?stream=false"))[0] == 200
    status, answer = await gateway.get(f"{route}?stream=1")
    assert (status, answer["error"]["param"]) == (400, "stream")

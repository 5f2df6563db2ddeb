"""A queue that does what it is asked, and whose answer is lost: nothing is cancelled that may be asked for again, no
finished answer is thrown away, and no second HTTP answer is written into a stream."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import EndReason
from service.gateway.core.accepted_request import seed_of
from service.queue.interface import OutcomeUnknown, QueueUnavailable
from tests.support.gateway import MODEL, QuickQueue, beside, open_gateway, speech
from tests.support.raw_http import RawClient
from tests.unit.service.gateway.ingress.test_ingress import payload

TEXT = "Hello world."
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES = {
    COMPLETIONS: {"model": MODEL, "prompt": "the and"},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": MODEL, "input": "hi"},
}
KEY = {"Idempotency-Key": "order-66"}


class LostAnswers(QuickQueue):
    """Loses the answers of calls in `lost`; calls in `away` do not happen either."""

    def __init__(self):
        super().__init__()
        self.lost: set[str] = set()
        self.away: set[str] = set()
        self._lose_answers(self.requests, "put_request")
        self._lose_answers(self.responses, "put_response")
        self._lose_answers(self.responses, "settle_response")

    def _lose_answers(self, store, name):
        method = getattr(store, name)

        async def call(*args):
            if name in self.away:
                raise QueueUnavailable("away")
            return await self._say(name, method(*args))

        setattr(store, name, call)

    async def _say(self, name, act):
        if name in self.away:
            act.close()
            raise OutcomeUnknown("away")
        answer = await act
        if name in self.lost:
            raise OutcomeUnknown("the answer was lost")
        return answer

    async def submit(self, *args):
        await self._say("submit", super().submit(*args))

    async def last_events(self, *args):
        if "last_events" in self.away:
            raise QueueUnavailable("away")
        return await super().last_events(*args)


@pytest.fixture
async def gateway(model_folder):
    async with open_gateway(model_folder, LostAnswers()) as opened:
        yield opened


def text_of(answer):
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


async def soon(found, within_s=5.0):
    async with asyncio.timeout(within_s):
        while not (there := await found()):
            await asyncio.sleep(0.01)
    return there


@pytest.mark.parametrize("lost", ["submit", "put_request"])
@pytest.mark.parametrize("path", BODIES)
async def test_the_retry_under_its_key_finds_the_job(gateway, path, lost):
    gateway.queue.lost = {lost}
    status, answer = await gateway.post(path, BODIES[path], headers=KEY)
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    gateway.queue.lost = set()
    status, answer = await gateway.post(path, BODIES[path], headers=KEY)
    assert (status, text_of(answer)) == (200, TEXT)
    assert (await gateway.post(path, BODIES[path], headers=KEY))[1]["id"] == answer["id"]
    assert (len(gateway.worker.jobs), gateway.worker.cancels) == (1, [])


async def test_a_background_request_is_not_cancelled(gateway):
    gateway.queue.lost = {"submit"}
    body = {**BODIES[CHAT], "background": True}
    assert (await gateway.post(CHAT, body, headers=KEY))[0] == 503
    gateway.queue.lost = set()
    status, state = await gateway.post(CHAT, body, headers=KEY)
    assert status == 202

    async def ended():
        found = (await gateway.get(f"/v1/requests/{state['id']}"))[1]
        return found if found["status"] not in ("queued", "in_progress") else None

    assert text_of((await soon(ended))["response"]) == TEXT
    assert gateway.worker.cancels == []


async def test_a_request_without_a_key_is_cancelled(gateway):
    """No client can ask for it again."""
    gateway.worker.script = lambda job: speech(gateway.model, TEXT, step_s=0.5)
    gateway.queue.lost = {"submit"}
    assert (await gateway.post(CHAT, BODIES[CHAT]))[0] == 503
    async with asyncio.timeout(5):
        await gateway.worker.cancelled()


async def test_of_several_prompts_the_retry_submits_what_is_missing(gateway):
    body = {"model": MODEL, "prompt": ["a", "b", "c"]}
    submit, num_submits = gateway.queue.submit, 0

    async def second_is_lost(*args):
        nonlocal num_submits
        num_submits += 1
        await submit(*args)
        if num_submits == 2:
            raise OutcomeUnknown("the answer was lost")

    gateway.queue.submit = second_is_lost
    assert (await gateway.post(COMPLETIONS, body, headers=KEY))[0] == 503
    await soon(lambda: _value(len(gateway.worker.jobs) == 2))
    status, answer = await gateway.post(COMPLETIONS, body, headers=KEY)
    assert (status, [choice["text"] for choice in answer["choices"]]) == (200, [TEXT] * 3)
    assert (len({job.job_id for job in gateway.worker.jobs}), gateway.worker.cancels) == (3, [])


async def _value(value):
    return value


async def test_a_producer_gets_replies_of_the_job_whose_submit_was_lost(gateway):
    gateway.queue.lost = {"submit"}
    await gateway.queue.produce("default", payload())
    await soon(lambda: _value(gateway.worker.jobs))
    gateway.queue.lost = set()
    await soon(lambda: _value(gateway.queue.data.replies_done))
    assert len(gateway.queue.replies("default", "job")) == 1
    assert (len(gateway.worker.jobs), gateway.worker.cancels) == (1, [])


async def test_an_accepted_background_request_is_answered_though_its_state_cannot_be_read(gateway):
    gateway.queue.away = {"last_events"}
    status, state = await gateway.post(CHAT, {**BODIES[CHAT], "background": True})
    assert (status, state["status"]) == (202, "queued")


async def test_an_outage_is_not_reported_as_the_end_of_a_request(gateway):
    """Nor stored as such."""
    _, answer = await gateway.post(RESPONSES, BODIES[RESPONSES])
    follow = gateway.queue.follow

    async def broken(*args):
        raise QueueUnavailable("away")
        yield

    gateway.queue.follow = broken
    request_id = answer["id"].removeprefix("resp_")
    status, received = await gateway.get(f"/v1/requests/{request_id}")
    assert (status, received["error"]["code"]) == (503, "unavailable")
    gateway.queue.follow = follow
    assert (await gateway.get(f"/v1/requests/{request_id}"))[1]["status"] == "completed"


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize("headers", [{}, KEY])
async def test_a_response_that_cannot_be_stored_is_given_and_stored_later(gateway, more, headers):
    gateway.queue.away = {"settle_response"}
    client = await RawClient.connect(gateway.url)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    body = b'{"model": "%b", "input": "hi", "stream": %b}' % (MODEL.encode(), b"true" if more else b"false")
    head = f"POST {RESPONSES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    await client.send(f"{head}{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(10):
        received = await client._reader.read(-1)
    await client.close()
    assert received.startswith(b"HTTP/1.1 200")
    assert received.count(b"HTTP/1.1") == 1
    assert received.count(b"event: response.completed") == len(more)
    assert b"error" not in received.replace(b'"error":null', b"")
    response_id = "resp_" + received.split(b'"id":"resp_')[1].split(b'"')[0].decode()
    status, answer = await gateway.get(f"{RESPONSES}/{response_id}")
    assert (status, answer["status"], text_of(answer)) == (200, "completed", TEXT)
    gateway.queue.away = set()

    async def settled():
        return (await gateway.queue.responses.get_response(response_id)).is_settled

    await soon(settled)


async def test_no_second_answer_is_written_into_a_begun_one(gateway, monkeypatch):
    """A handler may fail even after the end of its stream."""

    async def broken(self, stream, *args):
        await stream.send({"one": 1})
        await stream.done()
        raise KeyError("a bug")

    monkeypatch.setattr("service.gateway.routes.responses._Response.send", broken)
    client = await RawClient.connect(gateway.url)
    await client.post(RESPONSES, {**BODIES[RESPONSES], "stream": True})
    async with asyncio.timeout(5):
        try:
            received = await client._reader.read(-1)
        except ConnectionError:
            received = b""
    await client.close()
    assert received.count(b"HTTP/1.1") <= 1
    assert not received.endswith(b"0\r\n\r\n")  # it is cut off, not ended as if it were whole


async def test_another_gateway_streams_a_job_that_it_finds(model_folder, gateway):
    gateway.worker.script = lambda job: speech(gateway.model, TEXT, step_s=0.02)
    gateway.queue.lost = {"submit"}
    assert (await gateway.post(CHAT, BODIES[CHAT], headers=KEY))[0] == 503
    gateway.queue.lost = set()
    async with beside(gateway, model_folder) as other:
        status, answer = await other.post(CHAT, BODIES[CHAT], headers=KEY)
        assert (status, text_of(answer)) == (200, TEXT)
    assert EndReason.CANCELLED not in [cancel.reason for cancel in gateway.worker.cancels]


async def test_a_stream_continues_after_events_that_preceded_its_job(gateway):
    """A response begins when its job is queued, and sends no event twice when the job is submitted again."""
    gateway.worker.script = lambda job: speech(gateway.model, TEXT, step_s=0.2)
    body = {**BODIES[RESPONSES], "stream": True}
    numbers = []
    for last in (None, b"response.in_progress", None):
        headers = {**KEY, **({"Last-Event-ID": str(numbers[-1])} if numbers else {})}
        async with gateway.http.post(gateway.url + RESPONSES, json=body, headers=headers) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"id: "):
                    numbers.append(int(line[4:]))
                if not numbers[1:] and len(numbers) == 1 and line == b"\n":
                    break
                if last is not None and len(numbers) == 2:
                    break
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_job_that_is_submitted_again_has_the_same_seed(gateway):
    gateway.queue.away = {"submit"}
    assert (await gateway.post(CHAT, BODIES[CHAT], headers=KEY))[0] == 503
    gateway.queue.away = {"submit"}
    assert (await gateway.post(CHAT, BODIES[CHAT], headers=KEY))[0] == 503
    gateway.queue.away = set()
    assert (await gateway.post(CHAT, BODIES[CHAT], headers=KEY))[0] == 200
    (job,) = gateway.worker.jobs
    assert job.sampling.seed == seed_of(job.job_id)

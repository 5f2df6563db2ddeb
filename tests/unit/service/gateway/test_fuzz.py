"""Both entry points against anything: always one well-formed answer, never a 500, and the same verdict at both."""

import asyncio
import json

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from service.errors import EndReason
from service.gateway.core.request import CHAT, COMPLETIONS, RESPONSES
from service.gateway.openai.request_bodies import (
    IDLE_CHAT_FIELDS,
    IDLE_COMPLETION_FIELDS,
    IDLE_EMBEDDING_FIELDS,
    IDLE_POOLING_FIELDS,
    IDLE_RESPONSE_FIELDS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    PoolingBody,
)
from service.gateway.openai.responses.body import ResponseBody
from service.gateway.routes.tokenization import DetokenizeBody, TokenizeBody
from service.queue.codec import decode
from service.queue.messages import Reply
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, QuickIngress, QuickQueue, open_gateway
from tests.support.num_examples import num_examples

BODIES = {
    COMPLETIONS: {"model": MODEL, "prompt": "the and", "max_tokens": 4},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
FIELDS = {
    COMPLETIONS: sorted({*CompletionBody.__struct_fields__, *IDLE_COMPLETION_FIELDS, "nonsense"}),
    CHAT: sorted({*ChatBody.__struct_fields__, *IDLE_CHAT_FIELDS, "nonsense"}),
}
RESPONSE = {"model": MODEL, "input": "hi", "max_output_tokens": 4}
RESPONSE_FIELDS = sorted({*ResponseBody.__struct_fields__, *IDLE_RESPONSE_FIELDS, "nonsense"})
EXAMPLES = settings(max_examples=num_examples(150), deadline=None, suppress_health_check=list(HealthCheck))
LAST_WORDS_S = 5.0

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 5, 2**31, 2**63 - 1, -(2**63), 0.0, 0.5, 1e308, -1e-320, float("nan"), float("inf")]),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["user", "system", "text", "none", "auto", MODEL, "\x00", "<|im_end|>", "1", "５"]),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "include_usage"]) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@st.composite
def bodies(draw):
    """An endpoint and a good body with some fields replaced."""
    endpoint = draw(st.sampled_from(sorted(BODIES)))
    changes = draw(st.dictionaries(st.sampled_from(FIELDS[endpoint]), values, max_size=4))
    return endpoint, {**BODIES[endpoint], **changes}


@st.composite
def mangled(draw, start):
    """`start` with a few bytes changed, dropped, doubled or put in."""
    data = bytearray(start)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        how = draw(st.sampled_from(["change", "drop", "insert", "cut", "double"]))
        if how == "change" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "drop":
            del data[at : at + draw(st.integers(1, 8))]
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=6))
        elif how == "cut":
            del data[at:]
        else:
            data[at:at] = data[at : at + 16]
    return bytes(data)


class RecordingIngress(QuickIngress):
    """Keeps the replies of all jobs in order."""

    def __init__(self, data):
        super().__init__(data)
        self.replies = []

    async def reply(self, entry, reply_id, number, payload, *, is_last=False):
        self.replies.append(decode(Reply, payload))
        return await super().reply(entry, reply_id, number, payload, is_last=is_last)


class Doors:
    """Asks both entry points, from outside their loop."""

    def __init__(self, runner, gateway):
        self._runner = runner
        self._gateway = gateway

    def http(self, endpoint, data):
        """Status and error (None where it went well)."""
        return self._runner.run(self._http(endpoint, data))

    def queue(self, payload):
        """The error of the one final reply (None where it went well)."""
        return self._runner.run(self._queue(payload))

    async def _http(self, endpoint, data):
        headers = {"Content-Type": "application/json"}
        async with self._gateway.http.post(self._gateway.url + endpoint, data=data, headers=headers) as response:
            text = await response.text()
        if response.status != 200:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"].isprintable()
            return response.status, error
        if response.headers["Content-Type"].startswith("text/event-stream"):
            assert text.endswith("data: [DONE]\n\n")
        else:
            assert json.loads(text)["choices"][0]["finish_reason"] in ("stop", "length")
        return 200, None

    def response(self, data):
        """The same of a response, from its beginning to its end."""
        return self._runner.run(self._response(data))

    async def _response(self, data):
        headers = {"Content-Type": "application/json"}
        async with self._gateway.http.post(self._gateway.url + RESPONSES, data=data, headers=headers) as response:
            text = await response.text()
        if response.status != 200:
            return response.status, json.loads(text)["error"]
        if response.headers["Content-Type"].startswith("text/event-stream"):
            events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            answer = events[-1]["response"]
        else:
            answer = json.loads(text)
        assert answer["status"] in ("completed", "incomplete", "queued") or b"timeout" in data
        return 200, None

    async def _queue(self, payload):
        queue = self._gateway.queue
        for kept in (queue.ingress.replies, queue.data.replies, queue.data.reply_owners, queue.data.replies_done):
            kept.clear()  # else the same entry again would be no new job
        await queue.produce("default", payload)
        async with asyncio.timeout(LAST_WORDS_S):
            while not (queue.ingress.replies and queue.ingress.replies[-1].done):
                await asyncio.sleep(0.001)
        assert [reply.number for reply in queue.ingress.replies] == list(range(1, len(queue.ingress.replies) + 1))
        assert sum(reply.done for reply in queue.ingress.replies) == 1
        return queue.ingress.replies[-1].error


@pytest.fixture(scope="module")
def gateways(model_folder):
    with asyncio.Runner() as runner:
        opened = open_gateway(model_folder, runner.run(_queue()))
        gateway = runner.run(opened.__aenter__())
        yield Doors(runner, gateway)
        assert runner.run(gateway.get("/livez"))[0] == 200
        assert runner.run(gateway.post(CHAT, BODIES[CHAT]))[0] == 200
        runner.run(opened.__aexit__(None, None, None))


async def _queue():
    return QuickQueue(ingress=RecordingIngress)


def entry(endpoint, body):
    return msgpack.packb({"v": 1, "id": "fuzz", "endpoint": endpoint, "body": body})


@EXAMPLES
@given(bodies())
@example((COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": [2**64 - 1]}))
@example((COMPLETIONS, {**BODIES[COMPLETIONS], "stop_token_ids": [-(2**63)]}))
@example((COMPLETIONS, {**BODIES[COMPLETIONS], "logit_bias": {"\ud800": 1}}))
@example((CHAT, {**BODIES[CHAT], "messages": [{"role": "user", "content": "\x00"}]}))
def test_any_body(gateways, case):
    endpoint, body = case
    status, error = gateways.http(endpoint, json.dumps(body).encode())
    late = isinstance(body.get("timeout"), int | float)
    assert status in (200, 400, 404) or (late and status == 504)
    try:
        payload = entry(endpoint, body)
    except (ValueError, OverflowError):  # no msgpack, so no producer could write it
        return
    there = gateways.queue(payload)
    if late or (error and error["code"] == "invalid_json") or (there and there["code"] == "invalid_message"):
        return  # time limits, NaN and the like have other messages
    if there and there["param"] == "logprobs" and not error:
        return  # what replies do not carry
    assert (there and (there["param"], there["code"])) == (error and (error["param"], error["code"]))


item_fields = st.sampled_from(["type", "role", "content", "call_id", "name", "arguments", "output", "id", "text"])
item_values = values | st.sampled_from(["message", "function_call", "function_call_output", "{}", "assistant"])
items = st.lists(st.dictionaries(item_fields, item_values, max_size=6), max_size=3)
response_changes = st.dictionaries(st.sampled_from(RESPONSE_FIELDS), values | items, max_size=4)


@EXAMPLES
@given(response_changes | st.fixed_dictionaries({"input": items}))
@example({"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [2**63]}]}]})
@example({"input": [{"type": [], "role": "user", "content": ""}]})
@example({"previous_response_id": "{\x00}"})
@example({"include": ["message.output_text.logprobs"], "top_logprobs": 20, "stream": True})
@example({"background": True, "stream": True})
def test_any_response(gateways, changes):
    status, _ = gateways.response(json.dumps({**RESPONSE, **changes}).encode())
    assert status in (200, 400, 404) or ("timeout" in changes and status == 504)


OTHERS = {
    "/tokenize": ({"messages": [{"role": "user", "content": "hi"}]}, TokenizeBody, {}),
    "/detokenize": ({"tokens": [1, 2]}, DetokenizeBody, {}),
    "/pooling": ({"input": "hi"}, PoolingBody, IDLE_POOLING_FIELDS),
    "/v1/embeddings": ({"input": "hi"}, EmbeddingBody, IDLE_EMBEDDING_FIELDS),
    "/invocations": (
        {"prompt": "hi", "max_tokens": 4},
        ChatBody,
        {**IDLE_COMPLETION_FIELDS, "prompt": (), "input": ()},
    ),
}


@pytest.fixture(scope="module")
def embedding_gateway(model_folder):
    with asyncio.Runner() as runner:
        opened = open_gateway(model_folder, enable_embeddings=True)
        gateway = runner.run(opened.__aenter__())
        others = gateway.worker.script
        vector = Script([[5]], EndReason.LENGTH, embedding=(0.5,))
        gateway.worker.script = lambda job: vector if job.sampling.pooling else others(job)
        yield runner, gateway
        runner.run(opened.__aexit__(None, None, None))


async def _status(gateway, path, data):
    headers = {"Content-Type": "application/json"}
    async with gateway.http.post(gateway.url + path, data=data, headers=headers) as response:
        return response.status, await response.text()


@EXAMPLES
@given(st.data(), st.sampled_from(sorted(OTHERS)))
def test_any_body_of_other_routes(embedding_gateway, data, path):
    runner, gateway = embedding_gateway
    body, kind, idle = OTHERS[path]
    fields = st.sampled_from(sorted({*kind.__struct_fields__, *idle, "nonsense"}))
    changes = data.draw(st.dictionaries(fields, values, max_size=4))
    late = isinstance(changes.get("timeout"), int | float)
    status, text = runner.run(_status(gateway, path, json.dumps({**body, **changes}).encode()))
    assert status in (200, 202, 400, 404) or (late and status == 504), text
    if status >= 400:
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


@EXAMPLES
@given(st.data(), st.sampled_from(sorted(BODIES)))
def test_mangled_json(gateways, data, endpoint):
    status, _ = gateways.http(endpoint, data.draw(mangled(json.dumps(BODIES[endpoint]).encode())))
    assert status in (200, 400, 404)


@EXAMPLES
@given(st.data(), st.sampled_from(sorted(BODIES)))
def test_mangled_msgpack(gateways, data, endpoint):
    error = gateways.queue(data.draw(mangled(entry(endpoint, BODIES[endpoint]))))
    assert error is None or error["code"] != "internal_error"


@EXAMPLES
@given(st.binary(max_size=200))
def test_random_bytes(gateways, data):
    assert gateways.http(COMPLETIONS, data)[0] == 400
    assert gateways.queue(data)["code"] == "invalid_message"

"""Routes, optional fields and answers for clients of vLLM and SageMaker."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from service.errors import EndReason
from service.gateway.core.request import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from service.queue.codec import unpack_ids
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, open_gateway, speech

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "the"}, RESPONSES: {"input": "hi"}}


@pytest.fixture
async def embedding(model_folder):
    async with open_gateway(model_folder, enable_embeddings=True) as gateway:
        gateway.worker.script = lambda job: Script(
            [[5]], EndReason.LENGTH, embedding=(float(len(unpack_ids(job.prompt))), 0.5)
        )
        yield gateway


@pytest.mark.parametrize("path", [*BODIES, "/invocations"])
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": MODEL}])
async def test_the_model_may_be_left_out(gateway, path, model):
    status, answer = await gateway.post(path, {**BODIES.get(path, {"prompt": "the"}), **model})
    assert (status, answer["model"]) == (200, MODEL)
    assert gateway.worker.jobs[-1].model == MODEL


@pytest.mark.parametrize("path", BODIES)
async def test_another_model_is_not_there(gateway, path):
    for model in ("other", ""):
        status, answer = await gateway.post(path, {**BODIES[path], "model": model})
        assert (status, answer["error"]["param"]) == (404, "model")


async def test_a_request_without_a_model_is_found_again(gateway):
    _, queued = await gateway.post(COMPLETIONS, {"prompt": "the", "background": True})
    status, state = await gateway.get(f"/v1/requests/{queued['id']}")
    assert (status, state["endpoint"]) == (200, COMPLETIONS)


async def test_embeddings_without_a_model(embedding):
    status, answer = await embedding.post(EMBEDDINGS, {"input": "the"})
    assert (status, answer["model"]) == (200, MODEL)


async def test_prompt_logprobs_are_null_where_none_asked(gateway):
    _, chat = await gateway.post(CHAT, BODIES[CHAT])
    _, completion = await gateway.post(COMPLETIONS, {**BODIES[COMPLETIONS], "n": 2})
    assert chat["prompt_logprobs"] is None
    assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [None, None]


async def test_the_model_card_has_vllm_s_fields(gateway):
    _, listed = await gateway.get("/v1/models")
    (card,) = listed["data"]
    assert (card["id"], card["root"], card["parent"]) == (MODEL, MODEL, None)
    (permission,) = card["permission"]
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is permission["allow_logprobs"] is permission["allow_view"] is True
    assert (await gateway.get(f"/v1/models/{MODEL}"))[1] == card
    assert (await gateway.get("/v1/models"))[1] == listed


@pytest.mark.parametrize(
    ("options", "in_chunks", "at_end"),
    [
        ({"continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True, "include_usage": None}, True, True),
        ({"continuous_usage_stats": True, "include_usage": True}, True, True),
        ({"continuous_usage_stats": True, "include_usage": False}, False, False),
        ({"include_usage": True}, False, True),
        ({}, False, False),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_of_a_stream(gateway, path, options, in_chunks, at_end):
    gateway.worker.script = lambda job: speech(gateway.model, "hello world")
    body = {"model": MODEL, **BODIES[path], "stream": True, "stream_options": options}
    chunks = [json.loads(event) for event in (await gateway.events(path, body))[:-1]]
    ends = [chunk for chunk in chunks if not chunk["choices"]]
    usages = [chunk.get("usage") for chunk in chunks if chunk["choices"]]
    assert len(ends) == at_end
    assert all((usage is not None) == in_chunks for usage in usages)
    if in_chunks:
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == ends[0]["usage"]["completion_tokens"]
        if path == CHAT:
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            assert counts[0] == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_invocation_is_what_its_body_says(gateway, path):
    gateway.worker.script = lambda job: speech(gateway.model, "hello")
    _, own = await gateway.post(path, BODIES[path])
    status, answer = await gateway.post("/invocations", {**BODIES[path], "input": None})
    assert status == 200
    for body in (own, answer):
        del body["id"], body["created"]
    assert answer == own
    body = {**BODIES[path], "stream": True}
    assert len(await gateway.events("/invocations", body)) == len(await gateway.events(path, body))


async def test_an_invocation_may_be_long(gateway):
    status, answer = await gateway.post("/invocations", {"messages": MESSAGES, "prompt": "the " * 10_000})
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_an_invocation_may_embed(embedding):
    _, own = await embedding.post(EMBEDDINGS, {"input": ["the", "and the"]})
    assert await embedding.post("/invocations", {"input": ["the", "and the"]}) == (200, own)
    assert (await embedding.post("/invocations", {"input": "the", "dimensions": 3}))[0] == 400


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"model": MODEL}])
async def test_an_invocation_of_nothing_is_refused(gateway, body):
    status, answer = await gateway.post("/invocations", body)
    assert (status, answer["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": NaN}', b"\xff"])
async def test_an_invocation_that_is_no_json_is_refused(gateway, body):
    headers = {"Content-Type": "application/json"}
    async with gateway.http.post(gateway.url + "/invocations", data=body, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_json")


async def test_an_invocation_cannot_embed_where_that_is_off(gateway):
    status, answer = await gateway.post("/invocations", {"input": "the"})
    assert (status, answer["error"]["code"]) == (404, "embeddings_disabled")
    assert (await gateway.post("/pooling", {"input": "the"}))[0] == 404


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_pooling_is_embeddings_in_vllm_s_shape(embedding, encoding):
    body = {"input": ["the", "and the"], "encoding_format": encoding, "task": "embed", "embed_dtype": "float32"}
    status, answer = await embedding.post("/pooling", body)
    assert (status, answer["object"], answer["model"]) == (200, "list", MODEL)
    assert answer["id"].startswith("pool-")
    vectors = [one["data"] for one in answer["data"]]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]
    lengths = [len(unpack_ids(job.prompt)) for job in embedding.worker.jobs]
    assert sorted(vectors) == sorted([length, 0.5] for length in lengths)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(0, "pooling"), (1, "pooling")]
    assert answer["usage"] == {
        "prompt_tokens": sum(lengths), "total_tokens": sum(lengths),
        "completion_tokens": 0, "prompt_tokens_details": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": MESSAGES}, "messages"),
        ({"task": "classify"}, "task"),
        ({"dimensions": 3}, "dimensions"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"input": None}, "input"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_pooling_cannot_do_is_refused_by_name(embedding, fields, param):
    status, answer = await embedding.post("/pooling", {"input": "the", **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert embedding.worker.jobs == []


async def test_pooling_without_special_tokens_reads_the_text_alone(embedding):
    for adds in (True, False):
        await embedding.post("/pooling", {"input": "the", "add_special_tokens": adds})
        assert list(unpack_ids(embedding.worker.jobs[-1].prompt)) == embedding.model.tokenizer.encode("the", adds)


async def test_ping_needs_no_key(model_folder):
    async with open_gateway(model_folder, api_key="secret") as gateway:
        assert (await gateway.get("/ping"))[0] == (await gateway.post("/ping", {}))[0] == 200
        assert (await gateway.post("/invocations", {"prompt": "a"}))[0] == 401

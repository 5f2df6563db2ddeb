"""`/v1/embeddings` at the gateway, by the official client: in all forms of input and output, or refused."""

from __future__ import annotations

import shutil

import openai
import pytest

from service.errors import EndReason
from service.queue.codec import unpack_ids
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, open_gateway
from tests.support.responses import client_of

EMBEDDINGS = "/v1/embeddings"


def vector_of(job) -> Script:
    """Return a vector of the prompt's length and first token."""
    ids = unpack_ids(job.prompt)
    return Script([[5]], EndReason.LENGTH, embedding=(float(len(ids)), float(ids[0]), 0.25))


@pytest.fixture
async def served(model_folder):
    async with open_gateway(model_folder, enable_embeddings=True, pooling="last") as gateway:
        gateway.worker.script = vector_of
        async with client_of(gateway) as client:
            yield gateway, client


@pytest.mark.parametrize("encoding", ["float", "base64", openai.omit])
@pytest.mark.parametrize("given", ["the and", ["the", "and the"], [5, 6, 7], [[5], [6, 7]]])
async def test_every_form_of_input_and_output(served, given, encoding):
    gateway, client = served
    answer = await client.embeddings.create(model=MODEL, input=given, encoding_format=encoding)
    prompts = {job.job_id: unpack_ids(job.prompt) for job in gateway.worker.jobs}
    prompts = [prompts[name] for name in sorted(prompts)]
    assert [one.index for one in answer.data] == list(range(len(prompts)))
    if encoding != "base64":  # which the client decodes only where it asked for it by itself
        assert [one.embedding for one in answer.data] == [[len(ids), ids[0], 0.25] for ids in prompts]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    assert {job.sampling.pooling for job in gateway.worker.jobs} == {"last"}
    assert {job.sampling.max_tokens for job in gateway.worker.jobs} == {1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": "x " * 900}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 8}, "dimensions"),
        ({"stream": True}, "stream"),
    ],
)
async def test_what_cannot_be_is_refused(served, fields, param):
    gateway, _ = served
    status, answer = await gateway.post(EMBEDDINGS, {"model": MODEL, "input": "Hi", **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert gateway.worker.jobs == []


async def test_a_key_that_would_not_be_honoured_is_refused(served):
    gateway, _ = served
    status, answer = await gateway.post(EMBEDDINGS, {"model": MODEL, "input": "a"}, headers={"Idempotency-Key": "once"})
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")
    assert gateway.worker.jobs == []


async def test_it_is_refused_unless_it_is_enabled(gateway):
    async with client_of(gateway) as client:
        with pytest.raises(openai.NotFoundError, match="not enabled"):
            await client.embeddings.create(model=MODEL, input="Hi")


async def test_a_worker_without_a_vector_is_a_fault(served):
    gateway, _ = served
    gateway.worker.script = lambda job: Script([[5]], EndReason.LENGTH)
    status, _ = await gateway.post(EMBEDDINGS, {"model": MODEL, "input": "Hi"})
    assert status == 500


async def test_a_model_without_a_head_only_embeds(model_folder, tmp_path):
    base = shutil.copytree(model_folder, tmp_path / MODEL)
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"embed_tokens.weight": "model-1.safetensors"}}')
    async with open_gateway(base, enable_embeddings=True) as gateway:
        gateway.worker.script = vector_of
        status, answer = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hi"})
        assert (status, answer["error"]["message"]) == (400, "This model has no head: it only embeds (/v1/embeddings).")
        assert (await gateway.post(EMBEDDINGS, {"model": MODEL, "input": "Hi"}))[0] == 200
        assert len(gateway.worker.jobs) == 1

"""The official client, against a real server."""

import asyncio

import openai
import pytest

from tests.support.gateway import MODEL, open_gateway, speech

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def served(model_folder):
    async with (
        open_gateway(model_folder, api_key=("key",)) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="key", max_retries=0) as client,
    ):
        yield gateway, client


async def test_completion(served):
    _, client = served
    answer = await client.completions.create(model=MODEL, prompt="the and", max_tokens=50, logprobs=2, seed=1)
    assert answer.choices[0].text == "Hello world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.tokens[0] == "H"
    assert answer.usage.total_tokens == 11


async def test_chat(served):
    _, client = served
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1, stop=["world"], temperature=0
    )
    assert answer.choices[0].message.content == "Hello "
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.system_fingerprint


async def test_streams(served):
    _, client = served
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 8
    stream = await client.completions.create(model=MODEL, prompt="the", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world."


async def test_several_choices(served):
    _, client = served
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3)
    assert [choice.message.content for choice in answer.choices] == ["Hello world."] * 3
    texts = {0: "", 1: ""}
    async for chunk in await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "Hello world.", 1: "Hello world."}
    answer = await client.completions.create(model=MODEL, prompt=["the", "and"], n=2, best_of=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["the", "the", "and", "and"]
    beams = {"use_beam_search": True, "beam_width": 4}
    answer = await client.completions.create(model=MODEL, prompt=[1, 2], n=2, extra_body=beams)
    assert len(answer.choices) == 2


async def test_stream_helper(served):
    _, client = served
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello world."


async def test_leaving_a_stream_cancels_its_job(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
    async with await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
        await anext(aiter(stream))
    async with asyncio.timeout(2):
        assert (await gateway.worker.cancelled()).job_id == gateway.worker.jobs[0].job_id


async def test_models(served):
    _, client = served
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors(served):
    gateway, client = served
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=9)
    assert bad.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="top_a"):
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"top_a": 1})
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=MODEL, input="hi")
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
    with pytest.raises(openai.InternalServerError) as late:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"timeout": 0.05})
    assert late.value.status_code == 504


async def test_error_inside_a_stream(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_body={"timeout": 0.05}
    )
    with pytest.raises(openai.APIError, match="deadline"):
        [chunk async for chunk in stream]

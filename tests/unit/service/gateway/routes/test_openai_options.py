"""Every option that the official client has for an endpoint: it works, and the job shows it, or it is refused by name.

Each goes through the client as it is typed there, from the waiting client and from the asynchronous one, streamed too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from service.errors import EndReason
from service.queue.codec import unpack_ids
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, open_gateway, speech
from tests.support.responses import WEATHER, write_tool_model

REFUSED = "refused"
NO_EFFECT = "no effect"
Check = Callable[[Any], bool] | str
"""A condition on the job, or one of the two words above."""
Options = Mapping[str, tuple[Any, Check]]

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {key: WEATHER[key] for key in ("name", "description", "parameters")}}

SHARED: Options = {
    "model": (MODEL, lambda job: True),
    "frequency_penalty": (0.5, lambda job: job.sampling.frequency_penalty == 0.5),
    "presence_penalty": (-0.5, lambda job: job.sampling.presence_penalty == -0.5),
    "logit_bias": ({"7": 2}, lambda job: job.sampling.logit_bias == ((7, 2.0),)),
    "max_tokens": (5, lambda job: job.sampling.max_tokens == 5),
    "n": (2, lambda job: job.sampling.n == 2),
    "seed": (9, lambda job: job.sampling.seed == 9),
    "stop": (["zz"], lambda job: True),
    "temperature": (0.3, lambda job: job.sampling.temperature == 0.3),
    "top_p": (0.6, lambda job: job.sampling.top_p == 0.6),
    "user": ("someone", NO_EFFECT),
}
COMPLETIONS: Options = {
    **SHARED,
    "prompt": ([5, 6], lambda job: unpack_ids(job.prompt) == [5, 6]),
    "best_of": (2, lambda job: job.sampling.best_of == 2),
    "echo": (True, lambda job: True),
    "logprobs": (2, lambda job: job.sampling.logprobs == 2),
    "suffix": ("end", REFUSED),
}
CHATS: Options = {
    **SHARED,
    "messages": (MESSAGES, lambda job: True),
    "max_completion_tokens": (6, lambda job: job.sampling.max_tokens == 6),
    "logprobs": (True, lambda job: job.sampling.logprobs == 0),
    "top_logprobs": (3, lambda job: job.sampling.logprobs == 3),
    "response_format": ({"type": "json_object"}, lambda job: "%json" in job.sampling.grammar),
    "tools": ([TOOL], lambda job: len(unpack_ids(job.prompt)) > 60),
    "tool_choice": ("required", lambda job: "weather" in job.sampling.grammar),
    "parallel_tool_calls": (False, lambda job: True),
    "safety_identifier": ("someone", NO_EFFECT),
    "audio": ({"voice": "alloy", "format": "wav"}, REFUSED),
    "function_call": ("auto", REFUSED),
    "functions": ([{"name": "f", "parameters": {}}], REFUSED),
    "metadata": ({"a": "b"}, NO_EFFECT),
    "modalities": (["text", "audio"], REFUSED),
    "moderation": ({"model": "x"}, REFUSED),
    "prediction": ({"type": "content", "content": "x"}, REFUSED),
    "prompt_cache_key": ("k", NO_EFFECT),
    "prompt_cache_options": ({"mode": "explicit"}, REFUSED),
    "prompt_cache_retention": ("24h", NO_EFFECT),
    "reasoning_effort": ("high", NO_EFFECT),
    "service_tier": ("flex", REFUSED),
    "store": (True, NO_EFFECT),
    "verbosity": ("low", NO_EFFECT),
    "web_search_options": ({}, REFUSED),
}
RESPONSES: Options = {
    **{name: SHARED[name] for name in ("model", "temperature", "top_p", "user")},
    "input": ("hi", lambda job: True),
    "instructions": ("Be brief.", lambda job: len(unpack_ids(job.prompt)) > 10),
    "max_output_tokens": (6, lambda job: job.sampling.max_tokens == 6),
    "metadata": ({"a": "b"}, NO_EFFECT),
    "store": (False, NO_EFFECT),
    "text": ({"format": {"type": "json_object"}}, lambda job: "%json" in job.sampling.grammar),
    "tools": ([WEATHER], lambda job: len(unpack_ids(job.prompt)) > 60),
    "tool_choice": ("required", lambda job: "weather" in job.sampling.grammar),
    "parallel_tool_calls": (False, lambda job: True),
    "safety_identifier": ("someone", NO_EFFECT),
    "include": (["message.output_text.logprobs"], lambda job: job.sampling.logprobs == 0),
    "top_logprobs": (2, lambda job: job.sampling.logprobs == 2),
    "background": (True, lambda job: True),
    "previous_response_id": ("resp_none", REFUSED),
    "access_programs": (["x"], REFUSED),
    "context_management": ([{"type": "compaction"}], REFUSED),
    "conversation": ("conv_1", REFUSED),
    "image": ({}, REFUSED),
    "max_tool_calls": (3, NO_EFFECT),
    "moderation": ({"model": "x"}, REFUSED),
    "prompt": ({"id": "p"}, REFUSED),
    "prompt_cache_key": ("k", NO_EFFECT),
    "prompt_cache_options": ({"mode": "explicit"}, REFUSED),
    "prompt_cache_retention": ("24h", NO_EFFECT),
    "reasoning": ({"effort": "high"}, NO_EFFECT),
    "service_tier": ("flex", REFUSED),
    "truncation": ("auto", REFUSED),
}
EMBEDDINGS: Options = {
    "model": (MODEL, lambda job: True),
    "input": (["a", "b"], lambda job: job.sampling.pooling == "mean"),
    "encoding_format": ("base64", NO_EFFECT),
    "user": ("someone", NO_EFFECT),
    "dimensions": (8, REFUSED),
}
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "tool_choice": {"tools": None},
    "parallel_tool_calls": {"tools": None},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
}
"""Options that need others."""


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (CompletionParams, COMPLETIONS),
        (ChatParams, CHATS),
        (ResponseCreateParamsBase, RESPONSES),
        (EmbeddingCreateParams, EMBEDDINGS),
    ],
)
def test_the_client_has_no_option_that_is_not_tried(params, options):
    assert set(params.__annotations__) - {"stream_options"} == set(options)


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory):
    return write_tool_model(tmp_path_factory.mktemp("tools") / "model")


@pytest.fixture
async def served(tool_folder):
    async with open_gateway(tool_folder, enable_embeddings=True) as gateway:
        yield gateway


ENDPOINTS: Mapping[str, tuple[Callable[[Any], Any], Mapping[str, Any], Options]] = {
    "completions": (lambda client: client.completions, {"model": MODEL, "prompt": "the"}, COMPLETIONS),
    "chats": (lambda client: client.chat.completions, {"model": MODEL, "messages": MESSAGES}, CHATS),
    "responses": (lambda client: client.responses, {"model": MODEL, "input": "hi"}, RESPONSES),
    "embeddings": (lambda client: client.embeddings, {"model": MODEL, "input": "hi"}, EMBEDDINGS),
}
CASES = [(endpoint, option) for endpoint, (_, _, options) in ENDPOINTS.items() for option in options]


def asked(endpoint: str, option: str) -> dict[str, Any]:
    _, common, options = ENDPOINTS[endpoint]
    beside = {name: options[name][0] if value is None else value for name, value in NEEDS.get(option, {}).items()}
    return {**common, **{name: value for name, value in beside.items() if name in options}, option: options[option][0]}


def script(gateway, endpoint: str, option: str) -> None:
    if endpoint == "embeddings":
        gateway.worker.script = lambda job: Script([[5]], EndReason.LENGTH, embedding=(0.5, 0.25))
    elif option == "best_of":
        gateway.worker.script = lambda job: Script([[5]], EndReason.LENGTH, choices=(0,))
    elif "format" in option or option == "text":
        gateway.worker.script = lambda job: speech(gateway.model, '{"a": 1}')


async def expect(gateway, endpoint: str, option: str, ask: Callable[[], Any]) -> None:
    """`ask` is answered and its job is as it should be, or it is refused with the option's name."""
    check = ENDPOINTS[endpoint][2][option][1]
    script(gateway, endpoint, option)
    if check is REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask()
        assert caught.value.param.startswith(option)
        assert gateway.worker.jobs == []
        return
    await ask()
    async with asyncio.timeout(10):
        while not gateway.worker.jobs:
            await asyncio.sleep(0.005)
    assert check is NO_EFFECT or check(gateway.worker.jobs[0]), gateway.worker.jobs[0].sampling


@pytest.mark.parametrize(("endpoint", "option"), CASES)
async def test_asynchronous(served, endpoint, option):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0) as client:
        create = ENDPOINTS[endpoint][0](client).create
        await expect(served, endpoint, option, lambda: create(**asked(endpoint, option)))


@pytest.mark.parametrize(("endpoint", "option"), CASES)
async def test_waiting(served, endpoint, option):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0) as client:
        create = ENDPOINTS[endpoint][0](client).create
        await expect(served, endpoint, option, lambda: asyncio.to_thread(create, **asked(endpoint, option)))


@pytest.mark.parametrize(("endpoint", "option"), [case for case in CASES if case[0] != "embeddings"])
async def test_streamed(served, endpoint, option):
    async def read() -> None:
        stream = await create(stream=True, **asked(endpoint, option))
        assert [event async for event in stream]

    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0) as client:
        create = ENDPOINTS[endpoint][0](client).create
        await expect(served, endpoint, option, read)


@pytest.mark.parametrize("endpoint", ["completions", "chats"])
async def test_stream_options(served, endpoint):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0) as client:
        place, common, _ = ENDPOINTS[endpoint]
        stream = await place(client).create(**common, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError, match="include_obfuscation"):
            await place(client).create(**common, stream=True, stream_options={"include_obfuscation": True})

"""vLLM's `prompt_logprobs`: how likely each token of a prompt was, in a field of its own."""

import msgspec
import pytest

from service.errors import RequestError
from service.gateway.core.request import CHAT, COMPLETIONS
from service.gateway.openai.request_reader import read_request
from service.gateway.openapi import answers as openapi_answers
from tests.support.gateway import MODEL

PROMPT = {"model": MODEL, "prompt": "the and"}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_prompt_logprobs_in_vllms_form(gateway):
    body = {**PROMPT, "prompt": "the and", "prompt_logprobs": 1, "n": 2}
    status, answer = await gateway.post(COMPLETIONS, body)
    assert status == 200
    ids = gateway.model.tokenizer.encode("the and")
    for choice in answer["choices"]:
        first, *scored = choice["prompt_logprobs"]
        assert first is None
        assert len(scored) == len(ids) - 1
        for token, ranked in zip(ids[1:], scored, strict=True):
            assert str(token) in ranked
            assert {ranked[name]["rank"] for name in ranked} - {1} <= {None}
            assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in ranked.values())
        assert choice["logprobs"] is None
    msgspec.convert(answer, openapi_answers.Completion, strict=True)
    status, answer = await gateway.post(CHAT, {**MESSAGES, "prompt_logprobs": 0})
    assert status == 200
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    msgspec.convert(answer, openapi_answers.ChatCompletion, strict=True)
    _, plain = await gateway.post(CHAT, MESSAGES)
    assert plain["prompt_logprobs"] is None


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True},
               {"prompt_logprobs": 1, "echo": True, "logprobs": 1}]
)  # fmt: skip
def test_unsupported_combinations_are_refused(fields):
    with pytest.raises(RequestError) as caught:
        read_request(COMPLETIONS, {**PROMPT, **fields})
    assert (caught.value.status, caught.value.param) == (400, "prompt_logprobs")


async def test_only_echo_may_be_combined_with_them(gateway):
    _, answer = await gateway.post(
        COMPLETIONS, {**PROMPT, "prompt": ["the and", "and"], "echo": True, "prompt_logprobs": 0}
    )
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [
        len(gateway.model.tokenizer.encode(text)) for text in ("the and", "and")
    ]
    assert answer["choices"][0]["text"].startswith("the and")

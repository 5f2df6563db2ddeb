"""vLLM's `return_token_ids`: the ids of prompt and answer, in whole answers, streams and answers read again."""

import json

import msgspec

from service.gateway.core.request import CHAT, COMPLETIONS
from service.gateway.openapi import answers as openapi_answers
from tests.support.gateway import MODEL

PROMPT = {"model": MODEL, "prompt": ["the and", "and"], "n": 2, "return_token_ids": True}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
TEXT = "Hello world."


async def test_whole_answers(gateway):
    ids = gateway.model.tokenizer.encode(TEXT, add_special_tokens=False)
    prompts = [gateway.model.tokenizer.encode(text) for text in PROMPT["prompt"]]
    status, answer = await gateway.post(COMPLETIONS, PROMPT)
    assert status == 200
    msgspec.convert(answer, openapi_answers.Completion, strict=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [p for p in prompts for _ in range(2)]
    for choice in answer["choices"]:
        assert choice["token_ids"][: len(ids)] == ids
    assert sum(len(choice["token_ids"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]
    status, chat = await gateway.post(CHAT, MESSAGES)
    msgspec.convert(chat, openapi_answers.ChatCompletion, strict=True)
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"]
    _, plain = await gateway.post(CHAT, {**MESSAGES, "return_token_ids": False})
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in plain


async def test_streams_name_the_prompt_once_and_every_token(gateway):
    for endpoint, body in ((COMPLETIONS, {**PROMPT, "n": 1}), (CHAT, MESSAGES)):
        _, whole = await gateway.post(endpoint, body)
        chunks = [json.loads(data) for data in (await gateway.events(endpoint, body))[:-1]]
        for choice in whole["choices"]:
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
            ids = [token for chunk in own for token in chunk["choices"][0].get("token_ids", ())]
            assert ids == choice["token_ids"]
            heads = [chunk["choices"][0] if endpoint == COMPLETIONS else chunk for chunk in own]
            shown = [head["prompt_token_ids"] for head in heads if "prompt_token_ids" in head]
            assert shown == [(choice if endpoint == COMPLETIONS else whole)["prompt_token_ids"]]
            assert "prompt_token_ids" in heads[0]


async def test_the_longest_choice_is_measured(gateway):
    await gateway.post(COMPLETIONS, {**PROMPT, "prompt": "and"})
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "prompt": "and", "n": 2})
    text = await (await gateway.http.get(gateway.url + "/metrics")).text()
    (line,) = [line for line in text.split("\n") if line.startswith("vllm:request_max_num_generation_tokens_sum")]
    assert float(line.split()[1]) == 2 * len(answer["choices"][0]["token_ids"])


async def test_an_answer_read_again_has_them(gateway):
    _, first = await gateway.post(COMPLETIONS, {**PROMPT, "n": 1, "resumable": True})
    _, again = await gateway.get(f"/v1/requests/{first['id'].removeprefix('cmpl-')}")
    assert again["response"]["choices"] == first["choices"]

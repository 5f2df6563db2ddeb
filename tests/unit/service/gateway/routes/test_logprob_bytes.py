"""The bytes of log-probabilities, joined, are the content's: whichever tokenizer, choice and way to ask."""

from __future__ import annotations

import json

import pytest

from service.gateway.core.request import CHAT, RESPONSES
from tests.fakes.scripted_worker import Script
from tests.support import make_tokenizers
from tests.support.gateway import MODEL, open_gateway, speech, write_model

TEXTS = ("hello world", "  the  and", "안녕 🙂 the")
MESSAGES = [{"role": "user", "content": "hi"}]
LIKELIHOODS = "message.output_text.logprobs"
STYLES = ["llama2_style", "mistral_style", "gemma_style", "llama3_style", "qwen_style", "unigram", "wordpiece"]


@pytest.fixture(scope="module", params=STYLES)
def style_folder(request, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp(request.param) / "model")
    config = json.loads((folder / "config.json").read_text())
    getattr(make_tokenizers, request.param)(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4096, "eos_token_id": 1}))
    return folder


@pytest.fixture
async def styled(style_folder):
    async with open_gateway(style_folder) as gateway:
        branches = [speech(gateway.model, text).steps for text in TEXTS]
        gateway.worker.script = lambda job: Script(branches=branches[: job.sampling.n])
        yield gateway


def joined(entries) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")


def body(**fields):
    return {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **fields}


@pytest.mark.parametrize(
    "how", [{}, {"continue_final_message": True, "messages": [{"role": "assistant", "content": "a"}]}]
)
async def test_of_each_choice_of_a_chat(styled, how):
    _, answer = await styled.post(CHAT, body(n=3, **how))
    for choice in answer["choices"]:
        assert joined(choice["logprobs"]["content"]) == choice["message"]["content"]
    entry = answer["choices"][0]["logprobs"]["content"][0]
    assert all(isinstance(top["bytes"], list) for top in entry["top_logprobs"])


async def test_of_each_choice_of_a_stream(styled):
    texts, entries_by_index = {}, {}
    for event in await styled.events(CHAT, body(n=3, stream=True)):
        for choice in json.loads(event)["choices"] if event != "[DONE]" else ():
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["delta"].get("content", "")
            entries_by_index.setdefault(index, []).extend((choice["logprobs"] or {"content": []})["content"])
    assert {index: joined(entries) for index, entries in entries_by_index.items()} == texts


async def test_of_a_response(styled):
    styled.worker.script = lambda job: speech(styled.model, TEXTS[0])
    asked = {"model": MODEL, "input": "hi", "include": [LIKELIHOODS], "top_logprobs": 1}
    _, answer = await styled.post(RESPONSES, asked)
    (part,) = answer["output"][0]["content"]
    assert joined(part["logprobs"]) == part["text"]


async def test_a_token_that_stops_the_answer_has_no_bytes(styled):
    ids = styled.model.tokenizer.encode("the and", False)
    styled.worker.script = lambda job: Script([ids])
    _, answer = await styled.post(CHAT, body(stop_token_ids=[ids[-1]]))
    (choice,) = answer["choices"]
    assert joined(choice["logprobs"]["content"]) == choice["message"]["content"]
    assert choice["logprobs"]["content"][-1]["bytes"] == []


async def test_tokens_keep_their_own_text(styled):
    styled.worker.script = lambda job: speech(styled.model, TEXTS[0])
    _, answer = await styled.post(CHAT, body())
    texts = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    ids = speech(styled.model, TEXTS[0]).steps
    assert texts == [styled.model.tokenizer.token_text(token) for (token,) in ids]

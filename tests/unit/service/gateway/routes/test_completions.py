"""Completions and chats over HTTP: whole answers and streams in OpenAI's form, and their ends."""

import json

import pytest

from service.errors import EndReason
from service.queue.codec import unpack_ids
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MAX_POSITION, MODEL, open_gateway, speech

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "the and"}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def texts(events):
    """The text of every chunk of a stream that ended well."""
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    return [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]


async def test_completion(gateway):
    status, body = await gateway.post(COMPLETIONS, PROMPT)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice == {
        "index": 0, "text": "Hello world.", "logprobs": None, "finish_reason": "stop", "stop_reason": None,
        "prompt_logprobs": None,
    }  # fmt: skip
    num_tokens = len(gateway.model.tokenizer.encode("Hello world.")) + 1
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": num_tokens,
        "total_tokens": num_tokens + 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_usage_reports_drafts(gateway):
    """OpenAI's fields, over all prompts, whole and streamed."""
    counts = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}
    gateway.worker.script = lambda job: speech(gateway.model, "Hello world.", drafts=(4, 3))
    for path, body in ((COMPLETIONS, PROMPT), (CHAT, MESSAGES)):
        _, answer = await gateway.post(path, body)
        assert answer["usage"]["completion_tokens_details"] == counts
        events = await gateway.events(path, {**body, "stream_options": {"include_usage": True}})
        assert json.loads(events[-2])["usage"]["completion_tokens_details"] == counts
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "prompt": ["one", "two"]})
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 8
    _, answer = await gateway.post("/v1/responses", {"model": MODEL, "input": "hi"})
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 0, **counts}


async def test_chat(gateway):
    status, body = await gateway.post(CHAT, {**MESSAGES, "max_tokens": 5})
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert body["usage"]["completion_tokens"] == 5


async def test_a_job_carries_the_requested_parameters(gateway):
    await gateway.post(COMPLETIONS, {**PROMPT, "max_tokens": 3, "seed": -2, "top_p": 0.5, "logit_bias": {"7": 1}})
    await gateway.post(CHAT, MESSAGES)
    first, second = gateway.worker.jobs
    assert unpack_ids(first.prompt) == gateway.model.tokenizer.encode("the and")
    assert first.sampling.max_tokens == 3
    assert first.sampling.seed == 2**64 - 2
    assert first.sampling.top_p == 0.5
    assert first.sampling.logit_bias == ((7, 1.0),)
    assert first.deadline_s - first.submitted_at_s == 600
    assert first.tenant == "anonymous"
    assert len(first.job_id) == 26
    # Where the client is silent the model's makers speak, and a chat may fill the rest of the context.
    assert (first.sampling.temperature, first.sampling.top_k) == (0.6, 20)
    assert second.sampling.max_tokens == MAX_POSITION - len(second.prompt) // 4
    assert first.job_id != second.job_id
    assert second.sampling.seed not in (0, first.sampling.seed)


async def test_stream_of_chat(gateway):
    events = await gateway.events(CHAT, MESSAGES)
    assert "".join(texts(events)) == "Hello world."
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_with_usage(gateway):
    events = await gateway.events(COMPLETIONS, {**PROMPT, "stream_options": {"include_usage": True}})
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_events_carry_rising_ids(gateway):
    async with gateway.http.post(gateway.url + COMPLETIONS, json={**PROMPT, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        lines = (await response.text()).split("\n")
    ids = [int(line[4:]) for line in lines if line.startswith("id: ")]
    assert ids == sorted(ids)
    assert ids[0] == 1


async def test_stream_and_whole_say_the_same(gateway):
    text = "안녕하세요 é€ 🙂 hello"
    gateway.worker.script = lambda job: speech(gateway.model, text)
    _, whole = await gateway.post(CHAT, MESSAGES)
    assert whole["choices"][0]["message"]["content"] == text
    streamed = texts(await gateway.events(CHAT, MESSAGES))
    assert "".join(streamed) == text
    assert not any("\ufffd" in part for part in streamed)


async def test_stop_string(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello world. END of it", end=None)
    _, body = await gateway.post(COMPLETIONS, {**PROMPT, "stop": "END", "max_tokens": 100})
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello world. ", "stop")
    ids = gateway.model.tokenizer.encode("Hello world. END")
    assert body["usage"]["completion_tokens"] == len(ids)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}, "known before the worker sends the end"
    cancel = await gateway.worker.cancelled()
    assert (cancel.reason, cancel.job_id) == (EndReason.STOP, gateway.worker.jobs[0].job_id)
    events = await gateway.events(CHAT, {**MESSAGES, "stop": ["nope", "END"], "include_stop_str_in_output": True})
    assert "".join(texts(events)) == "Hello world. END"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
async def test_stop_reason_is_the_string_or_id(gateway, path, body):
    """vLLM's field: null for EOS and for the length, in a stream in a choice's last chunk."""
    comma = gateway.model.tokenizer.encode(",")[0]
    scripts = {
        "EN": lambda job: speech(gateway.model, "Hello END", end=None),
        comma: lambda job: Script([[*gateway.model.tokenizer.encode("Hello"), comma]]),
        None: lambda job: speech(gateway.model, "Hello"),
    }
    for wanted, script in scripts.items():
        gateway.worker.script = script
        asked = {**body, "stop": ["END", "EN"], "stop_token_ids": [comma, *gateway.model.eos_token_ids]}
        _, answer = await gateway.post(path, asked)
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", wanted)
        streamed = [json.loads(event)["choices"][0] for event in (await gateway.events(path, asked))[:-1]]
        assert [choice["stop_reason"] for choice in streamed if "stop_reason" in choice] == [wanted]
        assert streamed[-1]["stop_reason"] == wanted
    gateway.worker.script = lambda job: Script([[comma]], end=EndReason.LENGTH)
    assert (await gateway.post(path, body))[1]["choices"][0]["stop_reason"] is None


async def test_held_text_is_sent_at_the_end(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hello EN")
    assert "".join(texts(await gateway.events(COMPLETIONS, {**PROMPT, "stop": "END"}))) == "Hello EN"


async def test_the_end_token_is_no_text_unless_requested(gateway):
    token = gateway.model.tokenizer.encode("the")[0]
    gateway.worker.script = lambda job: Script([[*gateway.model.tokenizer.encode("hello"), token]])

    async def answer(**more):
        return (await gateway.post(COMPLETIONS, {**PROMPT, **more}))[1]["choices"][0]["text"]

    assert await answer() == "hellothe"
    assert await answer(stop_token_ids=[token]) == "hello"
    assert await answer(stop_token_ids=[token], include_stop_str_in_output=True) == "hellothe"
    gateway.worker.script = lambda job: speech(gateway.model, "hello")
    assert await answer(skip_special_tokens=False) == "hello"
    assert await answer(skip_special_tokens=False, ignore_eos=True) == "hello<|im_end|>"


async def test_logprobs_of_completions(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hé")
    _, body = await gateway.post(COMPLETIONS, {**PROMPT, "logprobs": 2})
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert all(len(entry) in (2, 3) for entry in logprobs["top_logprobs"])
    assert logprobs["top_logprobs"][0]["H"] == -0.5
    chunks = [json.loads(event) for event in (await gateway.events(COMPLETIONS, {**PROMPT, "logprobs": 2}))[:-1]]
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert {name: [x for part in streamed for x in part[name]] for name in logprobs} == logprobs


@pytest.mark.parametrize("spelt_out", [False, True])
async def test_an_offset_is_the_tokens_position_in_the_text(gateway, spelt_out):
    end = gateway.model.eos_token_ids[0]
    gateway.worker.script = lambda job: Script(
        [[*gateway.model.tokenizer.encode("é🙂"), end, *gateway.model.tokenizer.encode("ab")]]
    )
    prompt = [end, *gateway.model.tokenizer.encode("안")]
    body = {
        **PROMPT,
        "prompt": prompt,
        "echo": True,
        "logprobs": 0,
        "ignore_eos": True,
        "skip_special_tokens": not spelt_out,
    }
    _, answer = await gateway.post(COMPLETIONS, body)
    text, logprobs = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    spelling = "<|im_end|>" if spelt_out else ""
    assert text == f"{spelling}안é🙂{spelling}ab"
    found = dict(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    assert (found["a"], found["b"]) == (len(text) - 2, len(text) - 1)
    assert logprobs["text_offset"][1] == len(spelling)


async def test_logprobs_of_chat(gateway):
    gateway.worker.script = lambda job: speech(gateway.model, "Hé")
    _, body = await gateway.post(CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 2})
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:3]] == [[72], [0xC3], [0xA9]]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    assert content[0]["top_logprobs"][1]["logprob"] == -1.0
    assert len(content) == body["usage"]["completion_tokens"]
    _, body = await gateway.post(CHAT, {**MESSAGES, "logprobs": True})
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_keep_alive_comments_while_waiting(model_folder, monkeypatch):
    monkeypatch.setattr("service.gateway.routes.generation.KEEP_ALIVE_S", 0.05)
    async with open_gateway(model_folder) as gateway:
        gateway.worker.script = lambda job: speech(gateway.model, "a", step_s=0.2)
        async with gateway.http.post(gateway.url + CHAT, json={**MESSAGES, "stream": True}) as response:
            text = await response.text()
        assert text.startswith(": keep-alive\n\n")
        assert text.endswith("data: [DONE]\n\n")


async def test_echo_has_the_prompts_log_probabilities(gateway):
    body = {**PROMPT, "prompt": "the and", "echo": True, "logprobs": 1, "n": 2}
    ids = gateway.model.tokenizer.encode("the and")
    status, answer = await gateway.post(COMPLETIONS, body)
    assert status == 200
    assert gateway.worker.jobs[-1].sampling.prompt_logprobs == 1
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert choice["text"] == "the and" + "Hello world."
        assert logprobs["token_logprobs"][: len(ids)] == [None, *(-float(i) for i in range(1, len(ids)))]
        assert logprobs["token_logprobs"][len(ids)] == -0.5
        assert logprobs["top_logprobs"][0] is None
        assert -0.25 in logprobs["top_logprobs"][1].values()
        assert "".join(logprobs["tokens"][: len(ids)]) == "the and"
        assert logprobs["text_offset"][len(ids)] == len("the and")
        assert len({len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    whole = answer["choices"][0]["logprobs"]
    chunks = [json.loads(event) for event in (await gateway.events(COMPLETIONS, {**body, "n": 1}))[:-1]]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in whole} == whole
    assert chunks[0]["choices"][0]["text"] == "the and"


async def test_an_echo_without_an_answer(gateway):
    body = {**PROMPT, "prompt": "the and", "echo": True, "max_tokens": 0, "logprobs": 1, "n": 2}
    ids = gateway.model.tokenizer.encode("the and")
    _, answer = await gateway.post(COMPLETIONS, body)
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("the and", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids)))]
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(texts(await gateway.events(COMPLETIONS, {**body, "n": 1}))) == "the and"
    for refused in ({"echo": False}, {"min_tokens": 1}):
        status, answer = await gateway.post(COMPLETIONS, {**body, **refused})
        assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_echo_of_several_prompts_as_ids(gateway):
    first, second = (gateway.model.tokenizer.encode(text) for text in ("the and", "and"))
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "prompt": [first, second], "echo": True, "logprobs": 0})
    for choice, ids in zip(answer["choices"], (first, second), strict=True):
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][: len(ids)].count(None) == 1
        assert choice["logprobs"]["token_logprobs"][len(ids)] == -0.5

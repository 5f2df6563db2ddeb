"""Anthropic's API through its official client, against a real server."""

from __future__ import annotations

import asyncio
import importlib
import threading

import pytest

from service.errors import EndReason
from service.gateway.core.request import MESSAGES
from service.queue.codec import unpack_ids
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, beside, open_gateway, speech
from tests.support.responses import CALL, write_tool_model

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SAID = f"<think>\nI wonder. </think>\n\n{CALL}"
ORDER = [
    "message_start",
    *("content_block_start thinking", "thinking_delta", "signature_delta", "content_block_stop"),
    *("content_block_start text", "text_delta", "content_block_stop"),
    *("content_block_start tool_use", "input_json_delta", "content_block_stop"),
    *("message_delta", "message_stop"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_tool_model(tmp_path_factory.mktemp("messages") / "model")
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text(template + "{# </think> #}")
    return path


@pytest.fixture(scope="module")
def anthropic():
    """Imported where these tests run only: it takes 2 s of every test process."""
    return importlib.import_module("anthropic")


@pytest.fixture
async def served(folder, anthropic):
    async with (
        open_gateway(folder, api_key=("key",)) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="key", max_retries=0) as client,
    ):
        gateway.worker.script = lambda job: speech(gateway.model, SAID)
        yield gateway, client


def ask(client, **fields):
    return client.messages.create(**{"model": MODEL, "max_tokens": 200, "messages": HI, **fields})


async def test_a_whole_message_goes_back(served):
    gateway, client = served
    answer = await ask(client, tools=[WEATHER], system="Be kind.", metadata={"user_id": "u"})
    assert [part.type for part in answer.content] == ["thinking", "text", "tool_use"]
    thought, text, use = answer.content
    assert (thought.thinking, text.text, use.input) == ("I wonder.", "I look.", {"city": "Oslo"})
    assert (answer.id[:4], answer.role, answer.stop_reason) == ("msg_", "assistant", "tool_use")
    assert answer.id == f"msg_{answer._request_id}"
    assert answer.usage.input_tokens > 10
    assert answer.usage.output_tokens == len(gateway.model.tokenizer.encode(SAID)) + 1
    gateway.worker.script = lambda job: speech(gateway.model, "Rain.")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    talk = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = await ask(client, messages=talk, tools=[WEATHER])
    assert (last.content[0].text, last.stop_reason) == ("Rain.", "end_turn")
    counted = await client.messages.count_tokens(model=MODEL, messages=talk, tools=[WEATHER])
    assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


async def test_a_stream_has_its_events_in_order(served):
    _, client = served
    kinds = []
    async for event in await ask(client, tools=[WEATHER], stream=True):
        kind = event.type
        if kind == "content_block_start":
            kind += f" {event.content_block.type}"
        kinds.append(event.delta.type if kind == "content_block_delta" else kind)
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == ORDER
    async with client.messages.stream(model=MODEL, max_tokens=200, messages=HI, tools=[WEATHER]) as helper:
        assert helper.request_id is not None
        streamed = await helper.get_final_message()
    whole = await ask(client, tools=[WEATHER])
    for one in (streamed, whole):
        one.id = one.content[2].id = one.content[0].signature = ""
    assert streamed.model_dump(include={"content", "stop_reason"}) == whole.model_dump(
        include={"content", "stop_reason"}
    )
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_a_stream_is_taken_up_elsewhere_byte_for_byte(served, folder):
    gateway, _ = served
    headers = {"X-Api-Key": "key", "Idempotency-Key": "k", "anthropic-version": "2023-06-01"}
    body = {"model": MODEL, "max_tokens": 200, "messages": HI, "tools": [WEATHER], "stream": True}
    async with gateway.http.post(gateway.url + MESSAGES, json=body, headers=headers) as response:
        whole, request_id = await response.read(), response.headers["X-Request-Id"]
    assert b"event: message_stop\n" in whole
    async with beside(gateway, folder, api_key=("key",)) as other:
        for after in range(0, whole.count(b"\nid: "), 4):
            rest = whole[whole.rfind(b"event: ", 0, whole.find(b"id: %d\n" % (after + 1))) :]
            again = {**headers, "Last-Event-ID": str(after)}
            async with other.http.post(other.url + MESSAGES, json=body, headers=again) as response:
                assert await response.read() == rest
            url = f"{other.url}/v1/requests/msg_{request_id}"
            async with other.http.get(url, headers={"X-Api-Key": "key", "Last-Event-ID": str(after)}) as response:
                assert await response.read() == rest
        status, state = await other.get(f"/v1/requests/{request_id}", headers=headers)
        assert (status, state["response"]["type"], state["response"]["stop_reason"]) == (200, "message", "tool_use")


async def test_how_it_ends(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, "one two three")
    stopped = await ask(client, stop_sequences=["two"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one ", "stop_sequence", "two")
    gateway.worker.script = lambda job: Script([gateway.model.tokenizer.encode("one")], end=EndReason.LENGTH)
    assert (await ask(client, max_tokens=1)).stop_reason == "max_tokens"
    assert (await ask(client, max_tokens=9999)).stop_reason == "model_context_window_exceeded"
    assert gateway.worker.jobs[-1].sampling.max_tokens < 512
    gateway.worker.script = lambda job: Script([[gateway.model.eos_token_ids[0]]])
    assert (await ask(client)).content == []


async def test_a_prompt_above_the_context_is_refused_in_words_that_clients_know(served, anthropic):
    """Claude Code looks for the first words, and compacts its conversation."""
    _, client = served
    with pytest.raises(anthropic.BadRequestError) as refused:
        await ask(client, messages=[{"role": "user", "content": "the " * 600}])
    assert refused.value.body["error"]["message"].startswith("prompt is too long: This model's maximum context length")


async def test_leaving_cancels(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, "Hello", end=None)
    async with await ask(client, stream=True) as stream:
        async for event in stream:
            if event.type == "content_block_delta":
                break
    async with asyncio.timeout(2):
        assert (await gateway.worker.cancelled()).job_id == gateway.worker.jobs[0].job_id


async def test_errors_have_its_shape(served, anthropic):
    gateway, client = served
    with pytest.raises(anthropic.NotFoundError) as missing:
        await ask(client, model="claude")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        await ask(client, extra_body={"top_k": -7})
    with pytest.raises(anthropic.AuthenticationError):
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="no", max_retries=0) as stranger:
            await ask(stranger)
    for path, data, status, kind in (
        (MESSAGES, b"{", 400, "invalid_request_error"),
        (f"{MESSAGES}/batches", b"{}", 404, "not_found_error"),
        (f"{MESSAGES}/count_tokens", b'{"messages": []}', 400, "invalid_request_error"),
    ):
        found, answer = await gateway.post(path, data, headers={"X-Api-Key": "key"})
        assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    gateway.worker.script = lambda job: Script([gateway.model.tokenizer.encode("a")], end=EndReason.INTERNAL)
    with pytest.raises(anthropic.APIStatusError, match="engine failed"):
        [event async for event in await ask(client, stream=True)]


async def test_its_tool_runner_goes_on_without_a_thread(served, anthropic):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, SAID if len(gateway.worker.jobs) == 1 else "Rain.")

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=200, tools=[weather], messages=HI)
    assert [answer.stop_reason async for answer in runner] == ["tool_use", "end_turn"]
    assert "rain in Oslo" in gateway.model.tokenizer.decode(unpack_ids(gateway.worker.jobs[1].prompt))


async def test_the_synchronous_client(served, anthropic):
    gateway, _ = served
    gateway.worker.script = lambda job: speech(gateway.model, "Rain.")
    found = []

    def talk() -> None:
        with anthropic.Anthropic(base_url=gateway.url, auth_token="key", api_key=None, max_retries=0) as client:
            found.append(ask(client).content[0].text)
            with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
                found.append("".join(stream.text_stream))

    thread = threading.Thread(target=talk)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.01)
    assert found == ["Rain.", "Rain."]

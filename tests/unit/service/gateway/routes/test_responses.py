"""`/v1/responses`, by the official client: whole answers, conversations that go on, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json

import openai
import pytest
from pydantic import BaseModel

from service.errors import EndReason
from service.gateway.openai.responses.body import full_name
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, QuickQueue, beside, open_gateway, speech
from tests.support.responses import CALL, RESPONSES, WEATHER, client_of, write_tool_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tool_model(tmp_path_factory.mktemp("responses") / "model")


@pytest.fixture
async def served(folder):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        yield gateway, client


def prompt_of(gateway, number=-1) -> str:
    job = gateway.worker.jobs[number]
    ids = [int.from_bytes(job.prompt[i : i + 4], "little") for i in range(0, len(job.prompt), 4)]
    return gateway.model.tokenizer.decode(ids, skip_special_tokens=False)


async def test_a_text_is_answered(served):
    gateway, client = served
    answer = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", temperature=0.25, metadata={"a": "b"}, max_output_tokens=30
    )
    assert answer.output_text == "Hello world."
    assert (answer.object, answer.status, answer.error, answer.incomplete_details) == (
        "response",
        "completed",
        None,
        None,
    )
    assert (answer.instructions, answer.temperature, answer.top_p, answer.metadata) == (
        "Be kind.",
        0.25,
        1.0,
        {"a": "b"},
    )
    assert (answer.max_output_tokens, answer.background, answer.tool_choice, answer.tools) == (30, False, "none", [])
    assert answer.text.format.type == "text"
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert prompt_of(gateway) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert gateway.worker.jobs[-1].sampling.max_tokens == 30
    assert gateway.worker.jobs[-1].sampling.temperature == 0.25


async def test_what_is_cut_off_is_incomplete(served):
    _, client = served
    answer = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"


async def test_a_conversation_goes_on_from_what_is_stored(served):
    gateway, client = served
    first = await client.responses.create(model=MODEL, input="One", instructions="Only for the first.")
    second = await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    third = await client.responses.create(model=MODEL, input="Three", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    assert prompt_of(gateway) == (
        "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nHello world.<|im_end|>\n"
        "<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\nHello world.<|im_end|>\n"
        "<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"
    )
    items = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "One"),
        ("assistant", "Hello world."),
        ("user", "Two"),
        ("assistant", "Hello world."),
        ("user", "Three"),
    ]
    newest = await client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].content[0].text == "Three"
    assert await client.responses.retrieve(third.id) == third


async def test_the_tokens_of_a_conversation_are_counted(served):
    gateway, client = served
    first = await client.responses.create(model=MODEL, input="One")
    asked = {"model": MODEL, "input": "Two", "instructions": "Be kind.", "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(**asked, tools=[WEATHER])
    second = await client.responses.create(**asked, tools=[WEATHER])
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    assert len(gateway.worker.jobs) == 2
    for change, param in (
        ({"input": "a" * 500_000}, "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"model": "other"}, "model"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        _, answer = await gateway.post(f"{RESPONSES}/input_tokens", {**asked, **change})
        assert answer["error"]["param"] == param


async def test_another_gateway_goes_on_with_it(served, folder):
    gateway, client = served
    first = await client.responses.create(model=MODEL, input="One")
    async with beside(gateway, folder) as second, client_of(second) as other:
        assert (await other.responses.retrieve(first.id)).output_text == "Hello world."
        await other.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    assert "One" in prompt_of(gateway)


async def test_functions_of_a_namespace_with_hosted_tools(served):
    """Codex: MCP servers are namespaces, and a call without its `namespace` is no call of theirs."""
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, CALL.replace("weather", "mcp__sky__weather"))
    group = {"type": "namespace", "name": "mcp__sky", "description": "Tools of sky.", "tools": [WEATHER]}
    tools = [group, {"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"}]
    asked = {"model": MODEL, "input": "Oslo?", "extra_body": {"tools": [*tools, {**WEATHER, "name": "weather"}]}}
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    answer = events[-1].response
    call = answer.output[-1]
    assert (call.name, call.namespace, call.arguments) == ("weather", "mcp__sky", '{"city": "Oslo"}')
    (begun,) = (event.item for event in events if event.type == "response.output_item.added" and event.output_index)
    assert (begun.name, begun.namespace) == ("weather", "mcp__sky")
    assert [(tool.type, tool.name) for tool in answer.tools] == [("function", "weather")] * 2
    assert "web_search" not in prompt_of(gateway)
    assert "apply_patch" not in prompt_of(gateway)
    sent_back = [{"role": "user", "content": "Oslo?"}, call.model_dump(exclude_none=True)]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    search = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}
    gateway.worker.script = lambda job: speech(gateway.model, "Rain.")
    await client.responses.create(**{**asked, "input": [*sent_back, search, output]})
    assert '"name": "mcp__sky__weather"' in prompt_of(gateway).partition("Oslo?")[2]


def test_the_name_of_a_namespaces_function():
    assert full_name(None, "js") == full_name("", "js") == "js"
    assert full_name("mcp__node_repl", "js") == full_name("mcp__node_repl__", "js") == "mcp__node_repl__js"
    long = {full_name("mcp__server", f"{'x' * 60}{number}") for number in range(3)}
    assert {len(name) for name in long} == {64}
    assert len(long) == 3


async def test_calls_and_what_came_of_them(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, CALL)
    first = await client.responses.create(model=MODEL, input="Oslo?", tools=[WEATHER])
    message, call = first.output
    assert message.content[0].text == "I look."
    assert (call.type, call.name, call.arguments, call.status) == (
        "function_call",
        "weather",
        '{"city": "Oslo"}',
        "completed",
    )
    assert first.tool_choice == "auto"
    assert first.tools[0].name == "weather"
    gateway.worker.script = lambda job: speech(gateway.model, "Rain.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    by_id = await client.responses.create(model=MODEL, input=[result], tools=[WEATHER], previous_response_id=first.id)
    asked = [{"role": "user", "content": "Oslo?"}, *first.output, result]
    by_items = await client.responses.create(model=MODEL, input=asked, tools=[WEATHER], store=False)
    assert by_id.output_text == by_items.output_text == "Rain."
    assert prompt_of(gateway, -1) == prompt_of(gateway, -2)
    assert 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt_of(gateway)
    assert "<|im_start|>tool\nwet<|im_end|>" in prompt_of(gateway)


async def test_a_chosen_tool_is_enforced(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, CALL.removeprefix("I look.\n"))
    choice = {"type": "function", "name": "weather"}
    answer = await client.responses.create(model=MODEL, input="Oslo?", tools=[WEATHER], tool_choice=choice)
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.tool_choice.name == "weather"
    assert gateway.worker.jobs[-1].sampling.grammar is not None


class City(BaseModel):
    name: str


async def test_a_schema_is_enforced_and_parsed(served):
    gateway, client = served
    gateway.worker.script = lambda job: speech(gateway.model, '{"name": "Oslo"}')
    answer = await client.responses.parse(model=MODEL, input="Where?", text_format=City)
    assert answer.output_parsed == City(name="Oslo")
    assert answer.text.format.type == "json_schema"
    assert gateway.worker.jobs[-1].sampling.grammar is not None


async def test_logprobs_are_included(served):
    _, client = served
    answer = await client.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == answer.usage.output_tokens
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    assert answer.top_logprobs == 2


async def test_what_is_not_stored_or_deleted_or_anothers_is_not_found(folder, tmp_path):
    keys = tmp_path / "keys"
    lines = (f"{name}:sha256${hashlib.sha256(f'key-{name}'.encode()).hexdigest()}" for name in "ab")
    keys.write_text("\n".join(lines))
    async with (
        open_gateway(folder, api_key_file=keys) as gateway,
        client_of(gateway, "key-a") as mine,
        client_of(gateway, "key-b") as others,
    ):
        kept = await mine.responses.create(model=MODEL, input="Hi")
        loose = await mine.responses.create(model=MODEL, input="Hi", store=False)
        for client, name in ((others, kept.id), (mine, loose.id), (mine, "resp_{}"), (mine, "resp_x")):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(name)
            with pytest.raises(openai.BadRequestError, match="no such response") as refused:
                await client.responses.create(model=MODEL, input="Hi", previous_response_id=name)
            assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await others.responses.delete(kept.id)
        await mine.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            await mine.responses.retrieve(kept.id)


async def test_the_background_goes_on_without_a_client(served):
    gateway, client = served
    gateway.worker.paused = True
    queued = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    gateway.worker.paused = False
    async with asyncio.timeout(10):
        while (answer := await client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    assert (answer.status, answer.output_text) == ("completed", "Hello world.")
    assert answer == await client.responses.cancel(queued.id)
    assert answer.id == queued.id


async def test_the_background_is_cancelled(served):
    gateway, client = served
    speech_script = speech(gateway.model, "Hello")
    gateway.worker.script = lambda job: Script(speech_script.steps[:2], None)
    running = await client.responses.create(model=MODEL, input="Hi", background=True)
    async with asyncio.timeout(10):
        while (await client.responses.retrieve(running.id)).status != "in_progress":
            await asyncio.sleep(0.01)
    cancelled = await client.responses.cancel(running.id)
    assert (cancelled.status, cancelled.error) == ("cancelled", None)
    assert (await gateway.worker.cancelled()).reason is EndReason.CANCELLED
    assert (await client.responses.retrieve(running.id)).status == "cancelled"
    foreground = await client.responses.create(model=MODEL, input="Hi", background=False, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(foreground.id)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await client.responses.create(model=MODEL, input="Hi", previous_response_id=running.id)


async def test_a_failed_response_has_an_error(served):
    gateway, client = served
    gateway.worker.script = lambda job: Script([], EndReason.NUMERICAL_ERROR)
    with pytest.raises(openai.InternalServerError, match="produced NaN"):
        await client.responses.create(model=MODEL, input="Hi")
    running = await client.responses.create(model=MODEL, input="Hi", background=True)
    async with asyncio.timeout(10):
        while (answer := await client.responses.retrieve(running.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    assert (answer.status, answer.error.code) == ("failed", "numerical_error")


async def test_a_response_is_kept_for_the_configured_time(folder):
    async with open_gateway(folder, response_retention=0.05, queue=QuickQueue()) as gateway:
        status, answer = await gateway.post(RESPONSES, {"model": MODEL, "input": "Hi"})
        assert status == 200
        async with asyncio.timeout(10):
            while (await gateway.get(f"{RESPONSES}/{answer['id']}"))[0] != 404:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "r"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": "x" * 9000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"include": ["thoughts"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name_here(served, fields, param):
    gateway, _ = served
    status, answer = await gateway.post(RESPONSES, {"model": MODEL, "input": "Hi", **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    if answer["error"]["code"] not in ("context_length_exceeded", "previous_response_not_found"):
        assert f"'{param}'" in answer["error"]["message"]
    assert gateway.worker.jobs == []


async def test_an_idempotency_key_finds_the_first_answer(served):
    gateway, _ = served
    body, headers = {"model": MODEL, "input": "Hi"}, {"Idempotency-Key": "k"}
    _, first = await gateway.post(RESPONSES, body, headers=headers)
    _, again = await gateway.post(RESPONSES, body, headers=headers)
    assert json.dumps(first) == json.dumps(again)
    assert len(gateway.worker.jobs) == 1
    assert (await gateway.get(f"{RESPONSES}/{first['id']}"))[1] == first

"""Reasoning in `/v1/responses`: options, items in and out, events in their order."""

from __future__ import annotations

import pytest

from service.errors import RequestError
from service.gateway.core.request import RESPONSES
from service.gateway.openai.request_reader import read_request
from service.gateway.openai.responses.reasoning_items import ReasoningForm
from tests.support.gateway import MODEL, open_gateway, speech
from tests.support.responses import WEATHER, client_of, write_tool_model

THOUGHT = "<think>\nI look. </think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_tool_model(tmp_path_factory.mktemp("thinking") / "model")
    template = (path / "chat_template.jinja").read_text()
    template = template.replace(
        "{{ m.content }}", "{{ '<think>' + m.reasoning + '</think>' if m.reasoning }}{{ m.content }}"
    )
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture
async def served(folder):
    async with open_gateway(folder) as gateway, client_of(gateway) as client:
        gateway.worker.script = lambda job: speech(gateway.model, THOUGHT + "See. " + CALL)
        yield gateway, client


def prompt_of(gateway):
    job = gateway.worker.jobs[-1]
    ids = [int.from_bytes(job.prompt[i : i + 4], "little") for i in range(0, len(job.prompt), 4)]
    return gateway.model.tokenizer.decode(ids, skip_special_tokens=False)


async def test_items_of_an_answer_go_back(served):
    gateway, client = served
    first = await client.responses.create(model=MODEL, input="hi", tools=[WEATHER])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert (first.output[0].summary, first.output[0].content[0].text) == ([], "I look.")
    assert first.output[0].content[0].type == "reasoning_text"
    assert first.usage.output_tokens_details.reasoning_tokens > 3
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}
    await client.responses.create(model=MODEL, input=[result], previous_response_id=first.id, tools=[WEATHER])
    stored = prompt_of(gateway)
    assert "assistant\n<think>I look.</think>See." in stored
    sent = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output), result]
    await client.responses.create(model=MODEL, input=sent, store=False, tools=[WEATHER])
    assert prompt_of(gateway) == stored


async def test_a_summary_and_encrypted_content(served):
    gateway, client = served
    wants = {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    answer = await client.responses.create(model=MODEL, input="hi", store=False, text={"verbosity": "low"}, **wants)
    item = answer.output[0]
    assert (item.summary[0].text, item.content) == ("I look.", None)
    assert answer.reasoning.effort == "low"
    assert answer.text.verbosity == "low"
    bare = {"type": "reasoning", "id": item.id, "summary": [], "encrypted_content": item.encrypted_content}
    await client.responses.create(model=MODEL, input=[{"role": "user", "content": "a"}, bare], store=False, **wants)
    assert "<think>I look.</think>" in prompt_of(gateway)


@pytest.mark.parametrize(("summary", "name"), [(None, "reasoning"), ("detailed", "reasoning_summary")])
async def test_events(served, summary, name):
    _, client = served
    stream = await client.responses.create(model=MODEL, input="hi", stream=True, reasoning={"summary": summary})
    events = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    part = "content_part" if summary is None else "reasoning_summary_part"
    order = ["created", "in_progress", "output_item.added", f"{part}.added", f"{name}_text.delta", f"{name}_text.done"]
    order += [f"{part}.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"]
    assert list(dict.fromkeys(kinds))[: len(set(order))] == list(dict.fromkeys(order))
    assert "".join(event.delta for event in events if event.type == f"response.{name}_text.delta") == "I look."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output[0].type == "reasoning"


async def test_logprobs_are_of_the_content(served):
    _, client = served
    answer = await client.responses.create(model=MODEL, input="hi", include=["message.output_text.logprobs"])
    entries = answer.output[1].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().strip() == answer.output_text
    whole = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], logprobs=True
    )
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"budget": 1}}, "reasoning.budget"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"include": ["thoughts"]}, "include[0]"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "text", "text": "a"}]}]}, "input[0].summary[0].type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "encrypted_content": "quire1.?"}]}, "input[0].encrypted_content"),
    ],
)
def test_what_cannot_be_done_is_refused(fields, param):
    with pytest.raises(RequestError) as caught:
        read_request(RESPONSES, {"input": "hi", **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_places():
    assert ReasoningForm().place == "content"
    assert ReasoningForm(is_summary=True).part_type == "summary_text"

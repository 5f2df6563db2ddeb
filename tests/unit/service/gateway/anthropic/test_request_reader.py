"""Anthropic's bodies as the chats that ask for the same, and refusals in their own field names."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import RequestError
from service.gateway.anthropic.messages_body import IDLE_MESSAGES_FIELDS, MessagesBody
from service.gateway.anthropic.request_reader import read_count_body, read_messages, read_messages_body
from service.gateway.core.request import MESSAGES
from service.gateway.endpoints import read_outline
from tests.support.num_examples import num_examples

HI = [{"role": "user", "content": "hi"}]
USE = {
    "type": "tool_use",
    "id": "t1",
    "name": "clock",
    "input": {"zone": "UTC"},
    "cache_control": {"type": "ephemeral"},
}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}], "is_error": False}
CLOCK = {"name": "clock", "description": "the time", "input_schema": {"type": "object"}}
BODY = {"model": "m", "max_tokens": 9, "messages": HI}


def chat_of(**fields):
    request = read_messages({**BODY, **fields})
    return request, request.prompts[0]


def test_a_conversation():
    thought = {"type": "thinking", "thinking": "so", "signature": "x"}
    unreadable = {"type": "redacted_thinking", "data": "x"}
    talk = [
        *HI,
        {"role": "user", "content": [{"type": "text", "text": "you"}]},
        {"role": "assistant", "content": [thought, unreadable, {"type": "text", "text": "I look."}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
    ]
    system = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "kind."}]
    request, prompt = chat_of(messages=talk, system=system, tools=[CLOCK], stop_sequences=["X"], top_k=4)
    call = {"id": "t1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    reasoning = {"reasoning": "so", "reasoning_content": "so"}
    assert prompt.messages == (
        {"role": "system", "content": "Be\nkind."},
        {"role": "user", "content": "hi\nyou"},
        {"role": "assistant", "content": "I look.", **reasoning, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "t1"},
        {"role": "user", "content": "and?"},
    )
    assert prompt.tools[0]["function"]["name"] == "clock"
    assert (request.endpoint, request.stop, request.sampling.top_k) == (MESSAGES, ("X",), 4)
    assert prompt.add_generation_prompt


def test_a_prefilled_answer_is_continued():
    _, prompt = chat_of(messages=[*HI, {"role": "assistant", "content": "I am"}])
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_thinking():
    assert chat_of()[1].hints == chat_of(thinking={"type": "disabled"})[1].hints == {"reasoning_effort": "none"}
    on = chat_of(thinking={"type": "adaptive"}, output_config={"effort": "high"})[1]
    assert on.hints == {"reasoning_effort": "high"}
    assert on.template_options["enable_thinking"] is True
    assert not chat_of(thinking={"type": "adaptive", "display": "omitted"})[0].include_reasoning


def test_tools_and_forms():
    two = [CLOCK, {**CLOCK, "name": "sky", "strict": True, "type": "custom"}]
    assert chat_of(tools=two)[0].tools.must_call is False
    assert chat_of(tools=two, tool_choice={"type": "any"})[0].tools.must_call
    named = chat_of(tools=two, tool_choice={"type": "tool", "name": "sky"})[0].tools
    assert [function.name for function in named.callable] == ["sky"]
    assert chat_of(tools=two, tool_choice={"type": "none"})[0].tools is None
    assert chat_of(tools=two, tool_choice={"type": "auto", "disable_parallel_tool_use": True})[0].tools.only_one
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert (
        chat_of(output_format=form)[0].sampling.grammar == chat_of(output_config={"format": form})[0].sampling.grammar
    )


def test_the_record_and_the_count():
    request = read_messages_body(json.dumps({**BODY, "system": "long", "tools": [CLOCK], "stream": True}).encode())
    again = read_outline(MESSAGES, request.source.outline)
    assert (again.stream, again.tools) == (True, request.tools)
    assert [message["content"] for message in again.prompts[0].messages] == ["."]
    assert read_outline("/v1/completions", b'{"prompt": [0]}').prompts == ((0,),)
    name, prompt = read_count_body(json.dumps({"messages": HI, "system": "Be kind."}).encode())
    assert (name, len(prompt.messages)) == (None, 2)


def message(*parts, role="user"):
    return {"messages": [{"role": role, "content": list(parts)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (message({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (message({"type": "text"}), "messages[0].content[0].text"),
        (message({"type": "text", "text": "a", "extra": 1}), "messages[0].content[0].extra"),
        (message({**RESULT, "content": [{"type": "image", "text": ""}]}), "messages[0].content[0].content[0].type"),
        (message({**RESULT, "content": [{"type": "image", "source": {}}]}), "messages[0].content[0].content[0].type"),
        (message({"type": "redacted_thinking", "data": "x"}), "messages[0].content[0].type"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0].type"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{**USE, "name": "a b"}]}, *HI]},
            "messages[1].content[0]",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type"),
        ({"tools": [{**CLOCK, "max_uses": 5}]}, "tools[0].max_uses"),
        ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "sky"}}, "tool_choice.name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"mcp_servers": [{"url": "http://169.254.169.254/"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"metadata": {"user_id": "u" * 5000}}, "metadata.user_id"),
        ({"n": 2}, "n"),
        ({"seed": 1}, "seed"),
    ],
)
def test_what_cannot_be_done_is_refused(fields, param):
    with pytest.raises(RequestError) as caught:
        read_messages({**BODY, **fields})
    assert caught.value.status == 400
    assert caught.value.param.startswith(param)
    assert len(caught.value.param) < len(param) + 16
    assert f"'{caught.value.param}'" in caught.value.message


NAMES = sorted({*MessagesBody.__struct_fields__, *IDLE_MESSAGES_FIELDS, "nonsense"})
WORDS = [
    "role",
    "content",
    "type",
    "text",
    "tool_use",
    "tool_result",
    "user",
    "assistant",
    "id",
    "name",
    "input",
    "auto",
]
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(WORDS)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=num_examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=4))
def test_anything_is_read_or_refused(fields):
    with contextlib.suppress(RequestError):
        assert read_messages({**BODY, **fields}).endpoint == MESSAGES

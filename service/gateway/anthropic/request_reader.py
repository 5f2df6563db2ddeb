"""Reads Anthropic's `/v1/messages` as the equivalent chat; errors use Anthropic's field names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from service.errors import RequestError
from service.gateway.anthropic.messages_body import (
    IDLE_COUNT_FIELDS,
    IDLE_MESSAGES_FIELDS,
    NO_THREADS,
    PARTS,
    PARTS_OF_ROLE,
    ClientTool,
    Content,
    CountBody,
    MessagesBody,
    OutputFormat,
    RedactedThinkingContent,
    TextContent,
    Thinking,
    ThinkingContent,
    ToolResultContent,
    ToolSelection,
    ToolUseContent,
    Turn,
)
from service.gateway.core.refusals import refusal
from service.gateway.core.request import CHAT, MESSAGES, Conversation, GenerationRequest
from service.gateway.openai import request_reader
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_bodies import check_ranges, convert, without_idle_fields
from service.gateway.openai.strict_json import decode_object

Struct = TypeVar("Struct", bound=msgspec.Struct)

SHORTEST = {"messages": [{"role": "user", "content": "."}], "system": None}
MAX_USER_ID_CHARS = 4096
MAX_BUDGET = 1 << 31


def read_messages_body(data: bytes) -> GenerationRequest:
    """Read a JSON body and set `source`. Raises RequestError (400)."""
    fields = decode_object(data)
    return replace(read_messages(fields), source=request_reader.make_source(MESSAGES, fields, SHORTEST))


def read_messages(fields: Mapping[str, Any]) -> GenerationRequest:
    """Raises RequestError (400)."""
    if fields.get("thread") is not None:  # the client's tool runner requests one, and continues without it
        raise RequestError(400, "'thread' is not supported: send all messages.", param="thread", code=NO_THREADS)
    body = convert(without_idle_fields(fields, IDLE_MESSAGES_FIELDS), MessagesBody)
    check_ranges(body)
    if len(body.metadata.user_id or "") > MAX_USER_ID_CHARS:
        raise refusal("metadata.user_id", f"is longer than {MAX_USER_ID_CHARS} characters")
    chat = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    request = replace(_read(body, chat), endpoint=MESSAGES, stream=body.stream)
    is_hidden = body.thinking is not None and body.thinking.display == "omitted"
    sampling = replace(request.sampling, fits_context=True)
    return replace(request, sampling=sampling, include_reasoning=not is_hidden)


def read_count_body(data: bytes) -> tuple[str | None, Conversation]:
    """Return the model and the prompt to count. Raises RequestError (400)."""
    body = convert(without_idle_fields(decode_object(data), IDLE_COUNT_FIELDS), CountBody)
    (prompt,) = _read(body, {}).prompts
    assert isinstance(prompt, Conversation)
    return body.model, prompt


def _read(body: CountBody, chat: Json) -> GenerationRequest:
    messages = _messages(body)
    is_prefilled = messages.chat[-1]["role"] == "assistant"
    if is_prefilled and "tool_calls" in messages.chat[-1]:
        raise refusal("messages", "must have the results of the last tool_use")
    if body.output_format is not None and body.output_config.format is not None:
        raise refusal("output_format", "contradicts 'output_config.format'")
    fields = {
        **chat,
        **_thinking(body.thinking, body.output_config.effort),
        **_tools(body.tools, body.tool_choice),
        "model": body.model,
        "messages": messages.chat,
        "add_generation_prompt": not is_prefilled,
        "continue_final_message": is_prefilled,
        "response_format": _response_format(body.output_format or body.output_config.format),
    }
    try:
        return request_reader.read_request(CHAT, fields)
    except RequestError as error:
        raise _with_own_field_names(error, messages) from None


# Messages


@dataclass
class _Messages:
    """A chat's messages and the field each came from. Consecutive messages of one role are joined."""

    chat: list[Json] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def last_of(self, role: str, origin: str) -> Json:
        if not self.chat or self.chat[-1]["role"] != role:
            self.add({"role": role}, origin)
        return self.chat[-1]

    def add(self, message: Json, origin: str) -> None:
        self.chat.append(message)
        self.origins.append(origin)


def _messages(body: CountBody) -> _Messages:
    messages = _Messages()
    if body.system:
        content = body.system if isinstance(body.system, str) else _texts(body.system, "system")
        messages.add({"role": "system", "content": content}, "system")
    if not body.messages:
        raise refusal("messages", "must not be empty")
    for number, message in enumerate(body.messages):
        _add_message(messages, message, f"messages[{number}]")
    return messages


def _add_message(messages: _Messages, message: Turn, param: str) -> None:
    if message.role not in PARTS_OF_ROLE:
        raise refusal(f"{param}.role", f"must be one of {', '.join(PARTS_OF_ROLE)}")
    if isinstance(message.content, str):
        _add_part(messages, message.role, TextContent(type="text", text=message.content), param)
        return
    if not message.content:
        raise refusal(f"{param}.content", "must not be empty")
    for i, raw in enumerate(message.content):
        part = _part(raw, PARTS_OF_ROLE[message.role], f"{param}.content[{i}]")
        _add_part(messages, message.role, part, f"{param}.content[{i}]")


def _part(raw: Json, kinds: Sequence[str], param: str) -> Content:
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise refusal(f"{param}.type", f"must be {'one of ' * (len(kinds) > 1)}{', '.join(kinds)}")
    return _convert(raw, PARTS[kind], param)


def _convert(raw: Json, kind: type[Struct], param: str) -> Struct:
    """Convert the object at `param`; errors name the full path."""
    try:
        return convert(raw, kind)
    except RequestError as error:
        named = f"{param}.{error.param}"
        message = error.message.replace(f"'{error.param}'", f"'{named}'")
        raise RequestError(400, message, param=named, code=error.code) from None


def _add_part(messages: _Messages, role: str, part: Content, param: str) -> None:
    match part:
        case TextContent():
            messages.last_of(role, param).setdefault("content", []).append({"type": "text", "text": part.text})
        case ThinkingContent():
            message = messages.last_of(role, param)
            message["reasoning"] = message.get("reasoning", "") + part.thinking
        case RedactedThinkingContent():
            messages.last_of(role, param).setdefault("content", [])
        case ToolUseContent():
            function = {"name": part.name, "arguments": msgspec.json.encode(part.input).decode()}
            calls = messages.last_of(role, param).setdefault("tool_calls", [])
            calls.append({"id": part.id, "type": "function", "function": function})
        case ToolResultContent():
            content = part.content if isinstance(part.content, str) else _texts(part.content, f"{param}.content")
            messages.add({"role": "tool", "tool_call_id": part.tool_use_id, "content": content}, param)


def _texts(parts: list[Json], param: str) -> list[Json]:
    texts = [_part(part, ("text",), f"{param}[{i}]") for i, part in enumerate(parts)]
    return [{"type": "text", "text": text.text} for text in texts if isinstance(text, TextContent)]


# Options


def _thinking(thinking: Thinking | None, effort: str | None) -> Json:
    """Return the chat's fields for `thinking`. Without it, reasoning is off if the template can express that."""
    if effort not in (None, "low", "medium", "high", "xhigh", "max"):
        raise refusal("output_config.effort", "must be one of low, medium, high, xhigh, max")
    if thinking is None or thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    if thinking.type not in ("enabled", "adaptive", "between_tools"):
        raise refusal("thinking.type", "must be enabled, adaptive, between_tools or disabled")
    if thinking.display not in (None, "summarized", "omitted"):
        raise refusal("thinking.display", "must be summarized or omitted")
    budget = thinking.budget_tokens
    if budget is not None and not 1 <= budget <= MAX_BUDGET:
        raise refusal("thinking.budget_tokens", f"must be between 1 and {MAX_BUDGET}")
    return {
        "reasoning_effort": effort,
        "thinking_token_budget": budget,
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
    }


def _tools(tools: list[Json], choice: ToolSelection | None) -> Json:
    functions = []
    for i, raw in enumerate(tools):
        if raw.get("type") not in (None, "custom"):
            raise refusal(f"tools[{i}].type", "must be custom: tools of Anthropic's are not supported here")
        tool = _convert(raw, ClientTool, f"tools[{i}]")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        functions.append({"type": "function", "function": {**function, "strict": tool.strict}})
    if choice is None:
        return {"tools": functions}
    is_parallel = None if not choice.disable_parallel_tool_use else False
    named = {"type": "function", "function": {"name": choice.name or ""}}
    by_type: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if choice.type not in by_type:
        raise refusal("tool_choice.type", f"must be one of {', '.join(by_type)}")
    return {"tools": functions, "tool_choice": by_type[choice.type], "parallel_tool_calls": is_parallel}


def _response_format(asked: OutputFormat | None) -> Json | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        raise refusal("output_config.format.type", "must be json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": asked.schema, "strict": True}}


_OWN_NAMES = (
    (r"stop", "stop_sequences"),
    (r"response_format.*", "output_config.format"),
    (r"tools\[([0-9]+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[([0-9]+)\]\.function(.*)", r"tools[\1]\2"),
    (r"tool_choice\.function\.name", "tool_choice.name"),
)


def _with_own_field_names(error: RequestError, messages: _Messages) -> RequestError:
    """Rename the chat's fields in an error to those of the body."""
    if error.param is None:
        return error
    own = error.param
    if found := re.match(r"messages\[([0-9]+)\]", error.param):
        own = messages.origins[int(found[1])]
    for pattern, name in _OWN_NAMES:
        if found := re.fullmatch(pattern, error.param):
            own = found.expand(name)
            break
    return replace_param(error, own)


def replace_param(error: RequestError, param: str) -> RequestError:
    message = error.message.replace(f"'{error.param}'", f"'{param}'")
    return RequestError(error.status, message, error.type, param, error.code, error.retry_after_s)

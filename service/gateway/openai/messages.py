"""Reads OpenAI's messages and tools into a `Conversation` and a `ToolSpec`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from model.text.chat_template import OWN_VARIABLES
from model.text.tool_calls.reader import Function
from service.gateway.core.refusals import missing, refusal
from service.gateway.core.request import Conversation, ToolSpec
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_bodies import (
    IDLE_MESSAGE_FIELDS,
    ChatBody,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    check_part_types,
    without_idle_fields,
)
from service.gateway.openai.strict_json import MAX_DEPTH, depth_exceeds

MAX_LABEL_CHARS = 512
MAX_MESSAGES = 4096
MAX_TOOLS = 512  # agents with many MCP servers have hundreds of tools
MAX_CALLS_IN_MESSAGE = 128
MAX_ID_CHARS = 512
MAX_TEMPLATE_OPTIONS = 32
NOT_VARIABLES = frozenset(("chat_template", "continue_final_message", "tokenize"))
"""Other arguments of Hugging Face's `apply_chat_template`."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""OpenAI's default."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def plain_messages(value: Any) -> Any:
    """Drop idle fields of messages and refuse non-text parts; wrong types are left to the type check."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_MESSAGES:
        raise refusal("messages", f"has more than {MAX_MESSAGES} entries")
    return [
        _plain(message, f"messages[{i}]") if isinstance(message, dict) else message for i, message in enumerate(value)
    ]


def _plain(message: Json, param: str) -> Json:
    check_part_types(message.get("content"), ("text",), f"{param}.content")
    return without_idle_fields(message, IDLE_MESSAGE_FIELDS, f"{param}.")


def conversation(messages: list[Message], add_generation_prompt: bool, options: Mapping[str, Any]) -> Conversation:
    """Raises RequestError (400)."""
    if not messages:
        raise refusal("messages", "must not be empty")
    plain = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    return Conversation(messages=plain, add_generation_prompt=add_generation_prompt, template_options=options)


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _message(message: Message, param: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise refusal(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    content = message.content
    if message.tool_calls and message.role != "assistant":
        raise refusal(f"{param}.tool_calls", "belong to messages of the assistant")
    reasoning = _reasoning(message, param)
    if content is None:
        if not message.tool_calls and reasoning is None:
            raise missing(f"{param}.content")
        content = ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    plain: Json = {"role": ROLES[message.role], "content": content}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            check_length(f"{param}.{name}", value, MAX_LABEL_CHARS)
            plain[name] = value
    if reasoning is not None:
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        plain["tool_calls"] = _calls_of(message.tool_calls, f"{param}.tool_calls")
    return plain


def _reasoning(message: Message, param: str) -> str | None:
    names = ("reasoning", "reasoning_content")
    given = {name: value for name in names if (value := getattr(message, name)) is not None}
    if given and message.role != "assistant":
        raise refusal(f"{param}.{next(iter(given))}", "belongs to messages of the assistant")
    if len(set(given.values())) > 1:
        raise refusal(f"{param}.reasoning_content", "contradicts 'reasoning'")
    return next(iter(given.values()), None)


def template_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the chat template's variables. Raises RequestError (400)."""
    param = "chat_template_kwargs"
    if len(options) > MAX_TEMPLATE_OPTIONS:
        raise refusal(param, f"has more than {MAX_TEMPLATE_OPTIONS} entries")
    for name in options:
        if not _VARIABLE.fullmatch(name):
            raise refusal(param, "has a name that is no template variable (1 to 64 letters, digits or '_')")
        if name in OWN_VARIABLES or name in NOT_VARIABLES:
            raise refusal(param, f"cannot set {name}, which is a field of the request or of the model")
    if depth_exceeds(options, MAX_DEPTH):
        raise refusal(param, "is nested too deeply")
    return options


def check_length(param: str, text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise refusal(param, f"is longer than {max_chars} characters")


def read_tools(body: ChatBody) -> ToolSpec | None:
    """Return the functions that the response may call, if any. Raises RequestError (400)."""
    _check_tools(body.tools)
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if body.tools else "none"
    if isinstance(choice, ToolChoice):
        return _chosen_tools(body, choice)
    if choice not in ("none", "auto", "required"):
        raise refusal("tool_choice", "must be none, auto, required or a function")
    if choice != "none" and not body.tools:
        raise refusal("tool_choice", "needs 'tools'")
    if choice == "none":
        return None
    return _tool_spec(body, body.tools, must_call=choice == "required")


def _chosen_tools(body: ChatBody, choice: ToolChoice) -> ToolSpec:
    by_name = {tool.function.name: tool for tool in body.tools}
    if choice.type == "function" and choice.function is not None:
        if choice.function.name not in by_name:
            raise refusal("tool_choice.function.name", "is none of the tools")
        return _tool_spec(body, [by_name[choice.function.name]], must_call=True, is_named=True)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed, param = choice.allowed_tools, "tool_choice.allowed_tools"
        if allowed.mode not in ("auto", "required"):
            raise refusal(f"{param}.mode", "must be auto or required")
        names = {tool.function.name for tool in allowed.tools}
        if not names or not names <= by_name.keys():
            raise refusal(f"{param}.tools", "must be some of the tools")
        chosen = [tool for name, tool in by_name.items() if name in names]
        return _tool_spec(body, chosen, must_call=allowed.mode == "required")
    raise refusal("tool_choice.type", "must be function or allowed_tools, with the field of that name")


def _tool_spec(body: ChatBody, chosen: Sequence[Tool], *, must_call: bool, is_named: bool = False) -> ToolSpec:
    return ToolSpec(
        tools=tuple(map(_described, body.tools)),
        callable=tuple(map(_function_of, chosen)),
        must_call=must_call,
        is_named=is_named,
        only_one=is_named or body.parallel_tool_calls is False,
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise refusal("tools", f"has more than {MAX_TOOLS} entries")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise refusal(f"tools[{i}].function.name", "must be 1 to 64 letters, digits, '_' or '-'")
        if name in seen:
            raise refusal(f"tools[{i}].function.name", "is used by two tools")
        seen.add(name)


def _function_of(tool: Tool) -> Function:
    own = tool.function
    return Function(own.name, NO_PARAMETERS if own.parameters is None else own.parameters, bool(own.strict))


def _described(tool: Tool) -> Json:
    own = tool.function
    parameters = NO_PARAMETERS if own.parameters is None else own.parameters
    described = {} if own.description is None else {"description": own.description}
    return {"type": "function", "function": {"name": own.name, **described, "parameters": parameters}}


def _calls_of(calls: Sequence[ToolCall], param: str) -> list[Json]:
    """Return calls with parsed arguments, as templates expect. Raises RequestError (400)."""
    if len(calls) > MAX_CALLS_IN_MESSAGE:
        raise refusal(param, f"has more than {MAX_CALLS_IN_MESSAGE} entries")
    return [_call(call, f"{param}[{i}]") for i, call in enumerate(calls)]


def _call(call: ToolCall, param: str) -> Json:
    if call.type != "function":
        raise refusal(f"{param}.type", "must be function")
    if len(call.id) > MAX_ID_CHARS:
        raise refusal(f"{param}.id", f"is longer than {MAX_ID_CHARS} characters")
    if not _NAME.fullmatch(call.function.name):
        raise refusal(f"{param}.function.name", "must be 1 to 64 letters, digits, '_' or '-'")
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or depth_exceeds(arguments, MAX_DEPTH):
        raise refusal(f"{param}.function.arguments", "must be a JSON object, as text")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

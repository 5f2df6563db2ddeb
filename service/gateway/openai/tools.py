"""Tools in OpenAI's words: what an answer may or must call, and the calls and results that a conversation holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from model.text.tool_calls.reader import Function
from service.gateway.generation.refusals import refusal
from service.gateway.generation.request import ToolSpec
from service.gateway.openai.bodies import ChatBody, NamedTool, Tool, ToolCall
from service.gateway.openai.strict_json import MAX_DEPTH, depth_exceeds

MAX_TOOLS = 128
MAX_CALLS_IN_MESSAGE = 128
MAX_ID_CHARS = 512
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function without any: OpenAI's meaning of leaving them out."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Json = dict[str, Any]


def read_tools(body: ChatBody) -> ToolSpec | None:
    """What the answer may call; None where it may call nothing. Raises RequestError (400)."""
    _check_tools(body.tools)
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if body.tools else "none"
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, NamedTool):
        if choice.type != "function":
            raise refusal("tool_choice.type", "must be function")
        if choice.function.name not in names:
            raise refusal("tool_choice.function.name", "is none of the tools")
    elif choice not in ("none", "auto", "required"):
        raise refusal("tool_choice", "must be none, auto, required or a function")
    elif choice != "none" and not body.tools:
        raise refusal("tool_choice", "needs 'tools'")
    if choice == "none":
        return None
    is_named = isinstance(choice, NamedTool)
    chosen = [tool for tool in body.tools if not is_named or tool.function.name == choice.function.name]
    return ToolSpec(
        tools=tuple(map(_described, body.tools)),
        callable=tuple(map(_function, chosen)),
        must_call=is_named or choice == "required",
        is_named=is_named,
        only_one=is_named or body.parallel_tool_calls is False,
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise refusal("tools", f"has more than {MAX_TOOLS} entries")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise refusal(f"tools[{i}].type", "must be function")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise refusal(f"tools[{i}].function.name", "must be 1 to 64 letters, digits, '_' or '-'")
        if name in seen:
            raise refusal(f"tools[{i}].function.name", "stands twice among the tools")
        seen.add(name)


def _function(tool: Tool) -> Function:
    own = tool.function
    return Function(own.name, NO_PARAMETERS if own.parameters is None else own.parameters, bool(own.strict))


def _described(tool: Tool) -> Json:
    """What a chat template gets of it: what the client wrote, less what is only for us."""
    own = tool.function
    parameters = NO_PARAMETERS if own.parameters is None else own.parameters
    described = {} if own.description is None else {"description": own.description}
    return {"type": "function", "function": {"name": own.name, **described, "parameters": parameters}}


def calls_of(calls: Sequence[ToolCall], param: str) -> list[Json]:
    """The calls of an assistant's message as templates want them: the arguments are no text but their value."""
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

"""Reads a body of `/v1/responses` as the equivalent chat; errors use the body's field names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.core.refusals import missing, refusal
from service.gateway.core.request import GenerationRequest
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_bodies import (
    IDLE_ITEM_FIELDS,
    IDLE_RESPONSE_FIELDS,
    check_metadata,
    check_part_types,
    check_ranges,
    convert,
    without_idle_fields,
)
from service.gateway.openai.responses.body import (
    CallItem,
    CallOutputItem,
    ChosenTool,
    MessageItem,
    ResponseBody,
    TextFormat,
    full_name,
)
from service.gateway.openai.responses.reasoning_items import (
    ENCRYPTED_CONTENT,
    ReasoningForm,
    ReasoningItem,
    check_reasoning,
    reasoning_text,
)

MAX_ITEMS = 4096
MAX_NAME_CHARS = 256
STATUSES = ("in_progress", "completed", "incomplete")
LEFT_OUT_TOOLS = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    *("computer_use_preview", "local_shell", "shell", "apply_patch", "custom"),
)
"""Tool types not offered to the model: OpenAI's servers run them, or their calls are not functions."""

LEFT_OUT_ITEMS = ("web_search_call",)
"""Item types from other servers' responses that have nothing to show the model."""

LOGPROBS = "message.output_text.logprobs"
IDLE_INCLUDES = (
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results"),
)
"""Values of `include` for items that never occur."""
INCLUDES = (LOGPROBS, ENCRYPTED_CONTENT, *IDLE_INCLUDES)
VERBOSITIES = ("low", "medium", "high")
SAME_IN_A_CHAT = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls"),
    *("timeout", "priority", "user", "safety_identifier", "prompt_cache_key", "cache_salt"),
    *("thinking_token_budget", "chat_template_kwargs"),
)


_KINDS: Mapping[str, tuple[type[msgspec.Struct], str]] = {
    "message": (MessageItem, "msg"),
    "function_call": (CallItem, "fc"),
    "function_call_output": (CallOutputItem, "fco"),
    "reasoning": (ReasoningItem, "rs"),
}
_TEXT_FIELDS = {"message": "content", "function_call_output": "output"}
_ROLES = ("user", "assistant", "system", "developer")


@dataclass
class _Messages:
    """A chat's messages and the field each came from."""

    chat: list[Json] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    calls: dict[tuple[int, int], str] = field(default_factory=dict)  # by (message, index of call)

    def add(self, message: Json, origin: str) -> None:
        self.chat.append(message)
        self.origins.append(origin)

    def answer(self, message: Json, origin: str) -> None:
        """Add an assistant's message, merged with directly preceding reasoning."""
        last = self.chat[-1] if self.chat else {}
        if last.keys() == {"role", "reasoning"}:
            last |= message
        else:
            self.add(message, origin)

    def call(self, call: Json, origin: str) -> None:
        """Add a tool call to the preceding assistant message."""
        if not self.chat or self.chat[-1]["role"] != "assistant":
            self.add({"role": "assistant"}, origin)
        calls = self.chat[-1].setdefault("tool_calls", [])
        self.calls[len(self.chat) - 1, len(calls)] = origin
        calls.append(call)

    def own_name(self, param: str) -> str:
        """Return this body's name for a chat's `param`."""
        found = re.fullmatch(r"messages\[([0-9]+)\](?:\.tool_calls(?:\[([0-9]+)\])?)?(?:.*?(\.\w+))?", param)
        if found is None or int(found[1]) >= len(self.origins):
            return _own_name(param)
        place = int(found[1]), int(found[2] or 0)
        origin = self.calls.get(place) if ".tool_calls" in param else None
        return (origin or self.origins[place[0]]) + (found[3] or "")


def read_response(fields: Mapping[str, Any], read_chat: Callable[[Json], GenerationRequest]) -> GenerationRequest:
    """Raises RequestError (400)."""
    body = read_response_body(fields)
    messages = _Messages()
    if body.instructions is not None:
        messages.add({"role": "system", "content": body.instructions}, "instructions")
    for number, item in enumerate(items_of(body.input)):
        _add_item(messages, item, f"input[{number}]")
    try:
        request = read_chat(_chat(body, messages.chat))
    except RequestError as error:
        raise with_own_field_names(error, messages.own_name) from None
    grammar = request.sampling.grammar
    if grammar is not None:
        request = replace(request, sampling=replace(request.sampling, grammar=replace(grammar, param="text.format")))
    return replace(request, stream=body.stream, background=body.background)


def read_response_body(fields: Mapping[str, Any]) -> ResponseBody:
    """Raises RequestError (400)."""
    left = without_idle_fields(fields, IDLE_RESPONSE_FIELDS)
    if isinstance(left.get("tools"), list):
        left["tools"] = _functions(left["tools"])
    choice = left.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") not in ("function", "allowed_tools"):
        raise refusal("tool_choice.type", "must be function or allowed_tools")
    body = convert(left, ResponseBody)
    check_ranges(body)
    check_metadata(body.metadata)
    for i, wanted in enumerate(body.include):
        if wanted not in INCLUDES:
            raise refusal(f"include[{i}]", f"must be one of {', '.join(INCLUDES)}")
    if body.text.verbosity not in (None, *VERBOSITIES):
        raise refusal("text.verbosity", f"must be one of {', '.join(VERBOSITIES)}")
    ReasoningForm.of(body.reasoning, body.include)
    if body.top_logprobs and LOGPROBS not in body.include:
        raise refusal("top_logprobs", f"needs '{LOGPROBS}' in 'include'")
    if body.background and not body.store:
        raise refusal("background", "needs 'store' to be true")
    return body


def _functions(tools: Sequence[Any]) -> list[Any]:
    """Return the functions in `tools`, namespaces included. Raises RequestError (400) if there are none.

    Tools that run elsewhere are dropped, since agents offer them to every model.
    """
    found: list[Any] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else "function"
        if kind == "namespace":
            found += _functions_of(tool, f"tools[{i}]")
        elif kind == "function":
            found.append(tool)
        elif kind not in LEFT_OUT_TOOLS:
            raise refusal(f"tools[{i}].type", "must be function or namespace")
    if tools and not found:
        raise refusal("tools[0].type", "must be function or namespace: other tools are not run here")
    return found


def _functions_of(tool: Json, param: str) -> list[Json]:
    name, functions = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise missing(f"{param}.name")
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise refusal(f"{param}.tools", "must be a list of functions")
    for i, each in enumerate(functions):
        if each.get("type") != "function":
            raise refusal(f"{param}.tools[{i}].type", "must be function")
    return [{**each, "namespace": name} for each in functions]


def with_own_field_names(error: RequestError, name: Callable[[str], str] | None = None) -> RequestError:
    """Rename an error's fields, which are those of the equivalent chat or completion."""
    if error.param is None:
        return error
    own = (name or _own_name)(error.param)
    message = error.message.replace(f"'{error.param}'", f"'{own}'")
    return RequestError(error.status, message, error.type, own, error.code, error.retry_after_s)


_OWN_NAMES = (
    (r"messages|prompt", "input"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"response_format.*", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"verbosity", "text.verbosity"),
    (r"(tools\[[0-9]+\]|tool_choice)\.function(.*)", r"\1\2"),
    (r"tool_choice\.allowed_tools\.(.*)", r"tool_choice.\1"),
)


def _own_name(param: str) -> str:
    for pattern, own in _OWN_NAMES:
        if found := re.fullmatch(pattern, param):
            return found.expand(own)
    return param


def _add_item(messages: _Messages, item: Json, origin: str) -> None:
    if item["type"] == "function_call":
        function = {"name": full_name(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
        messages.call({"id": item["call_id"], "type": "function", "function": function}, origin)
    elif item["type"] == "reasoning":
        if text := reasoning_text(item):
            messages.add({"role": "assistant", "reasoning": text}, origin)
    elif item["type"] == "function_call_output":
        output = item["output"]
        content = output if isinstance(output, str) else _texts_of(output)
        messages.add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, origin)
    else:
        message = {"role": item["role"], "content": _texts_of(item["content"])}
        (messages.answer if item["role"] == "assistant" else messages.add)(message, origin)


def _chat(body: ResponseBody, messages: list[Json]) -> Json:
    chat = {name: getattr(body, name) for name in SAME_IN_A_CHAT}
    functions = [
        {"name": t.full_name, "description": t.description, "parameters": t.parameters, "strict": t.strict}
        for t in body.tools
    ]
    return {
        **chat,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": _chat_choice(body.tool_choice),
        "response_format": _response_format(body.text.format),
        "logprobs": True if LOGPROBS in body.include else None,
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": body.reasoning.effort,
        "verbosity": body.text.verbosity,
    }


def _chat_choice(choice: str | ChosenTool | None) -> Any:
    if not isinstance(choice, ChosenTool):
        return choice
    if choice.type == "function":
        return {"type": choice.type, "function": None if choice.name is None else {"name": choice.name}}
    tools = [{"type": tool.type, "function": {"name": tool.name}} for tool in choice.tools or ()]
    return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _response_format(asked: TextFormat | None) -> Json | None:
    if asked is None:
        return None
    if asked.type not in ("text", "json_object", "json_schema"):
        raise refusal("text.format.type", "must be one of text, json_object, json_schema")
    given = {
        name: value
        for name in ("name", "description", "schema", "strict")
        if (value := getattr(asked, name)) is not None
    }
    if asked.type != "json_schema":
        if given:
            raise refusal(f"text.format.{next(iter(given))}", "needs 'text.format.type' to be json_schema")
        return {"type": asked.type}
    for name in ("name", "schema"):
        if name not in given:
            raise missing(f"text.format.{name}")
    return {"type": "json_schema", "json_schema": given}


def items_of(asked: str | list[Json]) -> list[Json]:
    """Return an input's items, each with all fields and an id. Raises RequestError (400)."""
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not asked or len(asked) > MAX_ITEMS:
        raise refusal("input", f"must have 1 to {MAX_ITEMS} items")
    kept = [(i, item) for i, item in enumerate(asked) if item.get("type") not in LEFT_OUT_ITEMS]
    if not kept:
        raise refusal("input[0].type", f"must be one of {', '.join(_KINDS)}")
    return [_item(item, f"input[{i}]") for i, item in kept]


def check_answered_calls(items: Sequence[Json]) -> None:
    """Raises RequestError (400) for a call output without a preceding call."""
    called = set()
    for item in items:
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            raise RequestError(400, "'input' has the output of a call that is not there.", param="input")


def _item(asked: Json, param: str) -> Json:
    kind = "message" if asked.get("type") is None else asked["type"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise refusal(f"{param}.type", f"must be one of {', '.join(_KINDS)}")
    struct, prefix = _KINDS[kind]
    text_types = ("input_text", "output_text") if asked.get("role") == "assistant" else ("input_text",)
    if kind in _TEXT_FIELDS:
        check_part_types(asked.get(_TEXT_FIELDS[kind]), text_types, f"{param}.{_TEXT_FIELDS[kind]}")
    try:
        item = msgspec.to_builtins(convert(without_idle_fields(asked, IDLE_ITEM_FIELDS), struct))
    except RequestError as error:
        named = f"{param}.{error.param}"
        message = error.message.replace(f"'{error.param}'", f"'{named}'")
        raise RequestError(400, message, param=named, code=error.code) from None
    _check_names(item, param)
    if kind == "message":
        if item["role"] not in _ROLES:
            raise refusal(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
        item["content"] = _parts(item, text_types[-1])
    elif kind == "reasoning":
        check_reasoning(item, param)
    elif kind == "function_call_output" and not isinstance(item["output"], str):
        item["output"] = [{"type": part["type"], "text": part["text"]} for part in item["output"]]
    if item.get("namespace") is None:
        item.pop("namespace", None)
    return {**item, "id": item["id"] or f"{prefix}_{secrets.token_hex(16)}", "status": item["status"] or "completed"}


def _check_names(item: Json, param: str) -> None:
    """Bound the fields that are stored but cost no tokens. Raises RequestError (400)."""
    for name in ("id", "call_id", "name", "namespace"):
        if len(item.get(name) or "") > MAX_NAME_CHARS:
            raise refusal(f"{param}.{name}", f"must have at most {MAX_NAME_CHARS} characters")
    if item["status"] not in (None, *STATUSES):
        raise refusal(f"{param}.status", f"must be one of {', '.join(STATUSES)}")


def _parts(message: Json, kind: str) -> list[Json]:
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if kind == "input_text":
        return [{"type": kind, "text": part["text"]} for part in content]
    return [{"type": kind, "text": part["text"], "annotations": [], "logprobs": []} for part in content]


def _texts_of(parts: Sequence[Json]) -> list[Json]:
    return [{"type": "text", "text": part["text"]} for part in parts]

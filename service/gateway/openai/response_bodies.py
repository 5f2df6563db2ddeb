"""Bodies of `/v1/responses` in the words of a chat: items as messages, and its refusals in the words of here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.generation.refusals import missing, refusal
from service.gateway.generation.request import GenerationRequest
from service.gateway.openai.bodies import check_metadata, check_ranges, convert
from service.gateway.openai.fields import IDLE_RESPONSE_FIELDS, IDLE_TEXT_FIELDS, without_idle_fields
from service.gateway.openai.items import items_of, texts_of

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
"""The one thing that `include` can bring; everything else that it names at OpenAI does not exist here."""
SAME_IN_A_CHAT = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls"),
    *("timeout", "priority", "user", "safety_identifier"),
)


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    name: str


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    format: TextFormat | None = None


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    include: list[str] = []
    text: TextConfig = TextConfig()
    tools: list[ResponseTool] = []
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    stream: bool = False
    store: bool = True
    background: bool = False
    metadata: dict[str, str] = {}
    timeout: float | None = None
    priority: int = 0
    user: str = ""
    safety_identifier: str = ""


@dataclass
class _Messages:
    """Items as a chat's messages, and where each came from."""

    said: list[Json] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    calls: dict[tuple[int, int], str] = field(default_factory=dict)  # by message and place in it

    def add(self, message: Json, origin: str) -> None:
        self.said.append(message)
        self.origins.append(origin)

    def call(self, call: Json, origin: str) -> None:
        """A call belongs to the assistant's message before it."""
        if not self.said or self.said[-1]["role"] != "assistant":
            self.add({"role": "assistant"}, origin)
        calls = self.said[-1].setdefault("tool_calls", [])
        self.calls[len(self.said) - 1, len(calls)] = origin
        calls.append(call)

    def own_name(self, param: str) -> str:
        """The field here that a chat would call `param`."""
        found = re.fullmatch(r"messages\[([0-9]+)\](?:\.tool_calls(?:\[([0-9]+)\])?)?(?:.*?(\.\w+))?", param)
        if found is None or int(found[1]) >= len(self.origins):
            return _own_name(param)
        place = int(found[1]), int(found[2] or 0)
        origin = self.calls.get(place) if ".tool_calls" in param else None
        return (origin or self.origins[place[0]]) + (found[3] or "")


def read_response(fields: Mapping[str, Any], read_chat: Callable[[Json], GenerationRequest]) -> GenerationRequest:
    """The request that a body makes, by way of the chat that says the same. Raises RequestError (400)."""
    body = read_body(fields)
    messages = _Messages()
    if body.instructions is not None:
        messages.add({"role": "system", "content": body.instructions}, "instructions")
    for number, item in enumerate(items_of(body.input)):
        _say(messages, item, f"input[{number}]")
    try:
        request = read_chat(_chat(body, messages.said))
    except RequestError as error:
        raise in_own_words(error, messages.own_name) from None
    grammar = request.sampling.grammar
    if grammar is not None:
        request = replace(request, sampling=replace(request.sampling, grammar=replace(grammar, param="text.format")))
    return replace(request, stream=body.stream, background=body.background)


def read_body(fields: Mapping[str, Any]) -> ResponseBody:
    """Raises RequestError (400) for what does not fit, or cannot be had here."""
    left = without_idle_fields(fields, IDLE_RESPONSE_FIELDS)
    if isinstance(left.get("text"), dict):
        left["text"] = without_idle_fields(left["text"], IDLE_TEXT_FIELDS, "text.")
    for i, tool in enumerate(left["tools"] if isinstance(left.get("tools"), list) else ()):
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise refusal(f"tools[{i}].type", "must be function")
    if isinstance(left.get("tool_choice"), dict) and left["tool_choice"].get("type") != "function":
        raise refusal("tool_choice.type", "must be function")
    body = convert(left, ResponseBody)
    check_ranges(body)
    check_metadata(body.metadata)
    for i, wanted in enumerate(body.include):
        if wanted != LOGPROBS:
            raise refusal(f"include[{i}]", f"must be {LOGPROBS}")
    if body.top_logprobs is not None and LOGPROBS not in body.include:
        raise refusal("top_logprobs", f"needs '{LOGPROBS}' in 'include'")
    if body.background and not body.store:
        raise refusal("background", "needs 'store' to be true")
    return body


def in_own_words(error: RequestError, name: Callable[[str], str] | None = None) -> RequestError:
    """A refusal of the chat that a response is, or of the completion that an embedding is, with the fields named as
    they are here."""
    if error.param is None:
        return error
    own = (name or _own_name)(error.param)
    message = error.message.replace(f"'{error.param}'", f"'{own}'")
    return RequestError(error.status, message, error.type, own, error.code, error.retry_after_s)


_OWN_NAMES = (
    (r"messages|prompt", "input"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"response_format.*", "text.format"),
    (r"(tools\[[0-9]+\]|tool_choice)\.function(.*)", r"\1\2"),
)


def _own_name(param: str) -> str:
    for chats, own in _OWN_NAMES:
        if found := re.fullmatch(chats, param):
            return found.expand(own)
    return param


def _say(messages: _Messages, item: Json, origin: str) -> None:
    if item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        messages.call({"id": item["call_id"], "type": "function", "function": function}, origin)
    elif item["type"] == "function_call_output":
        output = item["output"]
        content = output if isinstance(output, str) else texts_of(output)
        messages.add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, origin)
    else:
        messages.add({"role": item["role"], "content": texts_of(item["content"])}, origin)


def _chat(body: ResponseBody, messages: list[Json]) -> Json:
    chat = {name: getattr(body, name) for name in SAME_IN_A_CHAT}
    functions = [
        {"name": t.name, "description": t.description, "parameters": t.parameters, "strict": t.strict}
        for t in body.tools
    ]
    choice = body.tool_choice
    if isinstance(choice, ChosenTool):
        choice = {"type": choice.type, "function": {"name": choice.name}}
    return {
        **chat,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "response_format": _response_format(body.text.format),
        "logprobs": True if LOGPROBS in body.include else None,
        "top_logprobs": body.top_logprobs,
    }


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

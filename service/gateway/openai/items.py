"""The items that a response goes on from: messages, calls of functions, and what came of them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.generation.refusals import refusal
from service.gateway.openai.bodies import convert
from service.gateway.openai.fields import IDLE_ITEM_FIELDS, without_idle_fields

Json = dict[str, Any]

MAX_ITEMS = 4096
MAX_NAME_CHARS = 256
STATUSES = ("in_progress", "completed", "incomplete")


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    text: str
    annotations: list[Any] = []  # an answer that is sent back has both; the model is shown neither, so none is stored
    logprobs: list[Any] = []


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str = "message"
    role: str
    content: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


_KINDS = {
    "message": (MessageItem, "msg"),
    "function_call": (CallItem, "fc"),
    "function_call_output": (CallOutputItem, "fco"),
}
_ROLES = ("user", "assistant", "system", "developer")


def items_of(asked: str | list[Json]) -> list[Json]:
    """The items of an input, each whole and under its id. Raises RequestError (400)."""
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not asked or len(asked) > MAX_ITEMS:
        raise refusal("input", f"must have 1 to {MAX_ITEMS} items")
    return [_item(item, f"input[{i}]") for i, item in enumerate(asked)]


def check_answered_calls(items: Sequence[Json]) -> None:
    """Raises RequestError (400) where an output answers a call that stands nowhere before it."""
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
        item["content"] = _parts(item, "output_text" if item["role"] == "assistant" else "input_text", param)
    elif kind == "function_call_output" and not isinstance(item["output"], str):
        _check_parts(item["output"], ("input_text",), f"{param}.output")
        item["output"] = [{"type": part["type"], "text": part["text"]} for part in item["output"]]
    return {**item, "id": item["id"] or f"{prefix}_{secrets.token_hex(16)}", "status": item["status"] or "completed"}


def _check_names(item: Json, param: str) -> None:
    """What is stored, and costs no token. Raises RequestError (400)."""
    for name in ("id", "call_id", "name"):
        if len(item.get(name) or "") > MAX_NAME_CHARS:
            raise refusal(f"{param}.{name}", f"must have at most {MAX_NAME_CHARS} characters")
    if item["status"] not in (None, *STATUSES):
        raise refusal(f"{param}.status", f"must be one of {', '.join(STATUSES)}")


def _parts(message: Json, kind: str, param: str) -> list[Json]:
    """The content of a message as it stands in an answer."""
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    _check_parts(content, {"input_text", kind}, f"{param}.content")
    if kind == "input_text":
        return [{"type": kind, "text": part["text"]} for part in content]
    return [{"type": kind, "text": part["text"], "annotations": [], "logprobs": []} for part in content]


def _check_parts(parts: Sequence[Json], kinds: Collection[str], param: str) -> None:
    for i, part in enumerate(parts):
        if part["type"] not in kinds:
            raise refusal(f"{param}[{i}].type", f"must be {' or '.join(sorted(kinds))}")


def texts_of(parts: Sequence[Json]) -> list[Json]:
    """Parts of an item as parts of a chat's message."""
    return [{"type": "text", "text": part["text"]} for part in parts]

"""Bytes to one JSON object, or one clear refusal: no NaN, no duplicate name, no lone surrogate, no deep nesting."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from service.errors import RequestError

MAX_DEPTH = 64


def decode_object(data: bytes) -> dict[str, Any]:
    """The object in `data`. Raises RequestError (400) for anything that is not exactly one well-formed JSON object.

    msgspec decides what is JSON. The second reading only looks for names that occur twice, of which every decoder
    would silently drop one.
    """
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except msgspec.ValidationError:
        raise _invalid("it holds a number out of range") from None
    except ValueError:
        raise _invalid("it is malformed or not UTF-8") from None
    if not isinstance(value, dict):
        raise _invalid("it must be an object")
    if depth_exceeds(value, MAX_DEPTH):
        raise _invalid("it is nested too deeply")
    try:
        json.loads(data, object_pairs_hook=_refuse_repeats, parse_int=str)
    except (ValueError, RecursionError):
        raise _invalid("it is malformed") from None
    return value


def decode_value(text: str, param: str) -> Any:
    """The JSON value in a text that stands in field `param`. Raises RequestError (400)."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        raise RequestError(400, f"'{param}' is not valid JSON.", param=param) from None


def depth_exceeds(value: Any, max_depth: int) -> bool:
    """Whether lists and maps nest deeper than that."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> list[Any]:
    values = node.values() if isinstance(node, dict) else node
    return [child for child in values if isinstance(child, (dict, list))]


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise _invalid("a name occurs twice in one object")


def _invalid(why: str) -> RequestError:
    return RequestError(400, f"The body is not valid JSON: {why}.", code="invalid_json")

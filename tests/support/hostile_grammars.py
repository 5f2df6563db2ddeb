"""Grammar requests of a few kilobytes at most that would take minutes or gigabytes to compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]


def patterns(number: int, count: int = 24) -> list[str]:
    """Return patterns that one text can match together; their intersection has a state for each subset."""
    return [f"a.*{chr(97 + i)}{i}.*{number}" for i in range(count)]


def _all_of(number: int) -> list[Json]:
    return [{"type": "string", "pattern": pattern} for pattern in patterns(number)]


def _behind_references(number: int) -> Json:
    parts = patterns(number)
    links = {
        f"d{i}": {"type": "string", "pattern": pattern, "allOf": [{"$ref": f"#/$defs/d{i + 1}"}]}
        for i, pattern in enumerate(parts)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{len(parts)}": {"type": "string"}}}


def _pattern_properties(number: int, count: int = 500) -> Json:
    keys = [f"^([ab]*a[ab]{{9}}x{i:03d}{number}|y{i:03d})$" for i in range(count)]
    return {"type": "object", "patternProperties": {key: {"type": "integer"} for key in keys}}


def _wide_patterns(number: int, count: int = 10) -> list[str]:
    """Return a few patterns with a state for each of many texts."""
    return [f"[ab]*{chr(97 + i % 2)}[ab]{{{11 + i}}}x{number}" for i in range(count)]


SCHEMAS: Mapping[str, Callable[[int], Json]] = {
    "allOf": lambda n: {"allOf": _all_of(n)},
    "in items": lambda n: {"type": "array", "items": {"allOf": _all_of(n)}, "minItems": 1},
    "in properties": lambda n: {
        "allOf": [{"type": "object", "properties": {"a": one}, "required": ["a"]} for one in _all_of(n)]
    },
    "behind references": _behind_references,
    "anyOf beside": lambda n: {"allOf": _all_of(n)[1:], "anyOf": _all_of(n)[:1]},
    "patternProperties": _pattern_properties,
    "in many choices": lambda n: {
        "type": "string",
        "allOf": [{"anyOf": [{"pattern": pattern}, {"pattern": f"no{i}"}]} for i, pattern in enumerate(patterns(n))],
    },
    "few patterns": lambda n: {"allOf": [{"type": "string", "pattern": p} for p in _wide_patterns(n)]},
}


def _of_schema(schema: Json) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}}


def _tool(schema: Json) -> Json:
    own = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    return {"tools": [{"type": "function", "function": {**own, "strict": True}}], "tool_choice": "required"}


def _lark(number: int) -> str:
    return "start: A\nA: " + " & ".join(f"/{pattern}/" for pattern in (f"(.*{p}.*)" for p in patterns(number)))


FIELDS: Mapping[str, Callable[[int], Json]] = {
    **{name: lambda n, make=make: _of_schema(make(n)) for name, make in SCHEMAS.items()},
    "guided_json": lambda n: {"guided_json": SCHEMAS["allOf"](n)},
    "structured_outputs": lambda n: {"structured_outputs": {"json": SCHEMAS["in items"](n)}},
    "tools": lambda n: _tool(SCHEMAS["allOf"](n)),
    "regex": lambda n: {"guided_regex": f"([ab]*a[ab]{{400}}){{300}}{n}"},
    "lark": lambda n: {"structured_outputs": {"grammar": _lark(n)}},
    "references to nothing": lambda n: _of_schema({"anyOf": [{"$ref": f"#/{n}/{i}"} for i in range(1900)]}),
}
"""Fields of a chat with a grammar; each number makes a new one, for no cache to know."""


def hostile_chat(model: str, name: str, number: int) -> Json:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **FIELDS[name](number)}

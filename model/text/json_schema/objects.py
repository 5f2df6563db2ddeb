"""Object rules as core schemas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from model.text.json_schema.core import OBJECT, Core, Kinds, ProofContext, all_of, any_of, of_kinds, values_of

MAX_COMBINATIONS = 64


def with_properties(names: Sequence[str]) -> Core:
    """Return the schema of objects with these properties, in this order unless another schema orders them."""
    return {"type": "object", "properties": dict.fromkeys(names, True), "required": list(dict.fromkeys(names))}


def without_property(name: str) -> Core:
    return {"type": "object", "properties": {name: False}}


def unless_object(kinds: Kinds, core: Core) -> Core:
    return any_of([of_kinds(kinds - OBJECT), core])


def sized(core: dict[str, Any], least: int, most: int | None) -> Core | None:
    """Return the object assertion `core` with `least` to `most` properties; None if no grammar can express it."""
    required = core.get("required", [])
    is_open = core.get("additionalProperties", True) is not False or bool(core.get("patternProperties"))
    optional = [
        name for name, value in core.get("properties", {}).items() if name not in required and value is not False
    ]
    least = 0 if least <= len(required) else least
    if most is not None and not is_open and most >= len(required) + len(optional):
        most = None
    if not least and most is None:
        return core
    if not optional:
        return _sized_by_others(core, least, most, is_open)
    choices = _choices(len(optional), least - len(required), None if most is None else most - len(required))
    if choices is None:
        return None
    found = []
    for chosen in choices:
        names = [optional[i] for i in chosen]
        is_enough = most is None and len(required) + len(names) >= least
        others = [] if is_enough else [name for name in optional if name not in names]
        properties = {**core["properties"], **dict.fromkeys(others, False)}
        variant = {**core, "properties": properties, "required": [*required, *names]}
        part = variant if is_enough else _sized_by_others(variant, least, most, is_open)
        found.append(False if part is None else part)
    return any_of(found)


def named(core: Core, known: ProofContext, depth: int = 0) -> Core | None:
    """Return the schema of objects whose property names match `core`; None if no grammar can express it."""
    if isinstance(core, bool):
        return core or {"type": "object", "maxProperties": 0}
    if "$ref" in core:
        return None if depth > 8 else named(known.lookup(core["$ref"]), known, depth + 1)
    if "allOf" in core:
        parts = [part for each in core["allOf"] if (part := named(each, known, depth + 1)) is not None]
        num_patterned = sum("patternProperties" in part for part in parts if isinstance(part, dict))
        return None if len(parts) < len(core["allOf"]) or num_patterned > 1 else all_of(parts)
    language = _names_language(core, known)
    if language is None:
        return None
    names, patterns = language
    found: dict[str, Any] = {"type": "object", "properties": dict.fromkeys(names, True), "additionalProperties": False}
    return {**found, "patternProperties": {"|".join(patterns): True}} if patterns else found


def _sized_by_others(core: dict[str, Any], least: int, most: int | None, is_open: bool) -> Core | None:
    """Return `sized` if all named properties are required; additional names make up the rest and might repeat."""
    num_required = len(core.get("required", []))
    if most is not None and most < num_required:
        return False
    if not is_open:
        return core if num_required >= least else False
    if least - num_required > 1:
        return None
    counts = {"minProperties": least if least > num_required else 0, "maxProperties": most}
    return {**core, **{key: value for key, value in counts.items() if value or (key == "maxProperties" and value == 0)}}


def _choices(num: int, least: int, most: int | None) -> list[tuple[int, ...]] | None:
    """Return sets of optional properties to require: exactly these, or at least these if they suffice."""
    largest = min(num, least if most is None else most)
    found: list[tuple[int, ...]] = []
    for size in range(max(largest, 0) + 1):
        for chosen in combinations(range(num), size):
            found.append(chosen)
            if len(found) > MAX_COMBINATIONS:
                return None
    return found if largest >= 0 else []


def _names_language(core: Core, known: ProofContext) -> tuple[list[str], list[str]] | None:
    """Return names and name patterns equivalent to the strings that a schema allows."""
    values = values_of(core, known)
    if values is not None and _is_only_values(core):
        return [value for value in values if isinstance(value, str)], []
    if isinstance(core, bool) or "$ref" in core or "allOf" in core:
        return None
    if "anyOf" in core:
        parts = [part for each in core["anyOf"] if (part := _names_language(each, known)) is not None]
        if len(parts) < len(core["anyOf"]):
            return None
        return [name for part in parts for name in part[0]], [pattern for part in parts for pattern in part[1]]
    types = core.get("type", "string")
    if types != "string" and "string" not in types:
        return [], []
    rules = [key for key in core if key not in ("type",)]
    if not rules:
        return [], [r"^[\s\S]*$"]
    if rules == ["pattern"]:
        return [], [core["pattern"]]
    if set(rules) <= {"minLength", "maxLength"}:
        return [], [rf"^[\s\S]{{{core.get('minLength', 0)},{core.get('maxLength', '')}}}$"]
    return None


def _is_only_values(core: Core) -> bool:
    return isinstance(core, dict) and set(core) <= {"enum", "type"} and "enum" in core

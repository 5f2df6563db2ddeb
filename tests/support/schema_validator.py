"""Validator of JSON values, with the keywords of drafts 7 to 2020-12.

`format` has no effect. References are within the schema, by pointer or anchor. Schemas must be well-formed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

TYPES = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip


@dataclass
class _Result:
    """Result of one value and schema: evaluated properties and items count only if it is valid."""

    is_valid: bool = True
    names: set[str] = field(default_factory=set)
    items: set[int] = field(default_factory=set)

    def add(self, other: _Result) -> None:
        self.is_valid &= other.is_valid
        if other.is_valid:
            self.names |= other.names
            self.items |= other.items


def is_valid(value: Any, schema: Any) -> bool:
    """Return whether `schema` allows `value`."""
    return _check(value, schema, schema).is_valid


def key_of(value: Any) -> str:
    """Return a key, equal for values that JSON Schema takes for equal: 1 and 1.0, but not true."""
    if isinstance(value, float) and value.is_integer():
        return json.dumps(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(key_of, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{key_of(value[name])}" for name in sorted(value)) + "}"
    return json.dumps(value)


def _check(value: Any, schema: Any, root: Any) -> _Result:
    if isinstance(schema, bool):
        return _Result(schema)
    found = _Result()
    for part in (_values, _numbers, _texts):
        found.is_valid &= part(value, schema)
    if isinstance(value, list):
        found.add(_array(value, schema, root))
    if isinstance(value, dict):
        found.add(_object(value, schema, root))
    _apply(value, schema, root, found)
    if isinstance(value, list) and "unevaluatedItems" in schema:
        rest = [i for i in range(len(value)) if i not in found.items]
        found.is_valid &= all(_check(value[i], schema["unevaluatedItems"], root).is_valid for i in rest)
        found.items |= set(rest)
    if isinstance(value, dict) and "unevaluatedProperties" in schema:
        rest = [name for name in value if name not in found.names]
        found.is_valid &= all(_check(value[name], schema["unevaluatedProperties"], root).is_valid for name in rest)
        found.names |= set(rest)
    return found


def _apply(value: Any, schema: dict[str, Any], root: Any, found: _Result) -> None:
    if "$ref" in schema:
        found.add(_check(value, _target(schema["$ref"], root), root))
    for each in schema.get("allOf", ()):
        found.add(_check(value, each, root))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            good = [result for each in schema[key] if (result := _check(value, each, root)).is_valid]
            found.is_valid &= len(good) == 1 if key == "oneOf" else bool(good)
            for result in good:
                found.add(result)
    if "not" in schema:
        found.is_valid &= not _check(value, schema["not"], root).is_valid
    if "if" in schema:
        condition = _check(value, schema["if"], root)
        if condition.is_valid:
            found.add(condition)
        found.add(_check(value, schema.get("then" if condition.is_valid else "else", True), root))


def _values(value: Any, schema: dict[str, Any]) -> bool:
    types = schema.get("type", list(TYPES))
    types = [types] if isinstance(types, str) else types
    choices = list(schema.get("enum", [value])) if "enum" in schema else None
    is_listed = choices is None or key_of(value) in map(key_of, choices)
    return is_listed and ("const" not in schema or key_of(value) == key_of(schema["const"])) and _has_type(value, types)


def _has_type(value: Any, types: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, TYPES[name]) for name in types)


def _numbers(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
    above = (low if above else low - 1) if isinstance(above, bool) else above
    below = (high if below else high + 1) if isinstance(below, bool) else below
    step = schema.get("multipleOf")
    fits = step is None or (Fraction(str(value)) / Fraction(str(step))).denominator == 1
    return low <= value <= high and above < value < below and fits


def _texts(value: Any, schema: dict[str, Any]) -> bool:
    if not isinstance(value, str):
        return True
    fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return fits and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)


def _array(value: list[Any], schema: dict[str, Any], root: Any) -> _Result:
    found = _Result(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
    items = schema.get("items")
    prefix, rest = (items, schema.get("additionalItems")) if isinstance(items, list) else (
        schema.get("prefixItems", []), items)  # fmt: skip
    for i, item in enumerate(value):
        own = prefix[i] if i < len(prefix) else rest
        if own is not None:
            found.is_valid &= _check(item, own, root).is_valid
            found.items.add(i)
    if "contains" in schema:
        held = {i for i, item in enumerate(value) if _check(item, schema["contains"], root).is_valid}
        found.is_valid &= schema.get("minContains", 1) <= len(held) <= schema.get("maxContains", len(value))
        found.items |= held
    if schema.get("uniqueItems"):
        found.is_valid &= len(set(map(key_of, value))) == len(value)
    return found


def _object(value: dict[str, Any], schema: dict[str, Any], root: Any) -> _Result:
    found = _Result(schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)))
    found.is_valid &= set(schema.get("required", ())) <= value.keys()
    for name, item in value.items():
        own = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        own += [each for pattern, each in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
        if not own and "additionalProperties" in schema:
            own = [schema["additionalProperties"]]
        found.is_valid &= all(_check(item, each, root).is_valid for each in own)
        found.names |= {name} if own else set()
        found.is_valid &= _check(name, schema.get("propertyNames", True), root).is_valid
    rules = {
        **schema.get("dependentRequired", {}),
        **schema.get("dependentSchemas", {}),
        **schema.get("dependencies", {}),
    }
    for name, rule in rules.items():
        if name in value and isinstance(rule, list):
            found.is_valid &= set(rule) <= value.keys()
        elif name in value:
            found.add(_check(value, rule, root))
    return found


def _target(ref: str, root: Any) -> Any:
    fragment = unquote(ref.removeprefix("#"))
    if fragment and not fragment.startswith("/"):
        return _anchored(root, fragment)
    found = root
    for step in fragment.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found[int(step)] if isinstance(found, list) else found[step]
    return found


def _anchored(schema: Any, name: str) -> Any:
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict) and item.get("$anchor") == name:
            return item
        stack += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []
    raise KeyError(name)

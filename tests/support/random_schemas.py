"""Random JSON schemas, and whether a value is what a schema allows: the part of JSON Schema that these schemas use."""

from __future__ import annotations

import random
import re
from typing import Any

NAMES = ("name", "age", "city", "tags", "is open", "größe", 'say "hi"', "x", "a/b", "items", "日本", "total_price")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(red|green|blue)$", "^[A-Z][a-z]*[0-9]?$")
TYPES = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """An object's schema, everything in it bounded, so that a model that knows nothing comes to an end as well."""
    schema = _object(rng, depth)
    if rng.random() < 0.2:
        schema["$defs"] = {"shared": _any(rng, 0)}
        schema["properties"][next(iter(schema["properties"]))] = {"$ref": "#/$defs/shared"}
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _constant, _choice]
    if depth > 0:
        kinds += [_array, _either, _object]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(("date", "uuid", "ipv4"))}
    return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 24)}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 50)}


def _constant(rng: random.Random, _: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 7, None, True, {"a": [1]}])}


def _choice(rng: random.Random, _: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 1, 2.5, None, False, "two words"], rng.randint(1, 4))}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    few = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": few, "maxItems": few + rng.randint(0, 2)}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1), {"type": rng.choice(("null", "boolean"))}]}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Whether `value` is what `schema` allows."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(is_valid(value, one, root) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return any(_same(value, one) for one in schema.get("enum", [schema.get("const")]))
    if not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, str):
        pattern = schema.get("pattern")
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30)
        return fits and (pattern is None or re.search(pattern, value) is not None)
    if isinstance(value, list):
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(is_valid(item, schema["items"], root) for item in value)
    if isinstance(value, dict):
        known = schema["properties"]
        complete = set(schema["required"]) <= value.keys() <= known.keys()
        return complete and all(is_valid(item, known[name], root) for name, item in value.items())
    return schema.get("minimum", value) <= value <= schema.get("maximum", value) if value is not None else True


def _same(one: Any, other: Any) -> bool:
    """JSON's equality: true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)

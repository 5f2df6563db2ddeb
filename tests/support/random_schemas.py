"""Random JSON schemas: some for models to answer, some only to check values against."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "city", "tags", "is open", "größe", 'say "hi"', "x", "a/b", "items", "日本", "total_price")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(red|green|blue)$", "^[A-Z][a-z]*[0-9]?$")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return an object's schema, bounded in every part, so that even a random model completes it."""
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
        kinds += [_array, _either, _object, _ordered, _containing, _but, _one_of_them, _dependent, _unevaluated]
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


def _ordered(rng: random.Random, _: int) -> dict[str, Any]:
    """Return different values in any order."""
    values = rng.sample(["red", "green", 1, 2.5, None, False], rng.randint(1, 4))
    return {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": rng.randint(0, 1)}


def _containing(rng: random.Random, _: int) -> dict[str, Any]:
    few = rng.randint(1, 2)
    bounds = {"minContains": few, "maxContains": few} if rng.random() < 0.5 else {}
    items = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "array", "items": items, "maxItems": few + 2, "contains": {"maximum": 3}, **bounds}


def _but(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema with a `not`."""
    if rng.random() < 0.5:
        schema = _integer(rng, depth)
        return {**schema, "maximum": schema["maximum"] + 1, "not": {"enum": [schema["minimum"], "red", None]}}
    return {"enum": ["red", "green", "two words", 7, 8], "not": {"enum": ["red", 7, None]}}


def _one_of_them(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return one of two objects that differ in their properties."""
    first, second = (_object(rng, depth - 1) for _ in range(2))
    first["properties"]["kind"], second["properties"]["kind"] = {"const": "first"}, {"const": "second"}
    if rng.random() < 0.5:
        first["required"].append("kind")
    second["required"].append("kind")
    return {"oneOf": [first, second]}


def _dependent(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return an object whose properties require others."""
    schema = _object(rng, depth)
    names = list(schema["properties"])
    rules = [
        {"dependentRequired": {names[0]: [names[-1]]}},
        {"if": {"required": [names[0]]}, "then": {"required": [names[-1]]}, "else": {"minProperties": 0}},
        {"dependentSchemas": {names[-1]: {"required": names[:1]}}},
        {"minProperties": 1},
        {"maxProperties": len(schema["required"]) + 1},
        {"propertyNames": {"enum": names}},
        {"not": {"required": names}} if len(schema["required"]) < len(names) else {},
    ]
    return schema | rng.choice(rules)


def _unevaluated(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return an object of two schemas without other properties."""
    first, second = (_object(rng, depth - 1) for _ in range(2))
    del first["additionalProperties"], second["additionalProperties"]
    return {"type": "object", "allOf": [first, {"anyOf": [second, True]}], "unevaluatedProperties": False}


FEW_NAMES = ("a", "b", "c")
FEW_VALUES = (None, True, False, 0, 1, 2, 3.5, -1, "", "a", "ab", "abc", [], [1], {}, {"a": 1})


def random_rules(rng: random.Random, depth: int = 3) -> Any:
    """Return a schema of random keywords about few names and values."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice((True, {"type": "integer"}, {"enum": rng.sample(FEW_VALUES, 2)}, {"type": "string"}))
    schema: dict[str, Any] = {}
    if rng.random() < 0.6:
        schema["type"] = rng.choice(("object", "object", "array", "integer", "string", ["string", "null"], "number"))
    for rule in rng.sample(RULES, rng.randint(1, 3)):
        schema |= rule(rng, depth - 1)
    return schema


def random_value(rng: random.Random, depth: int = 2) -> Any:
    """Return a value that may match such a schema."""
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(FEW_VALUES)
    if kind < 0.5:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {name: random_value(rng, depth - 1) for name in rng.sample(FEW_NAMES, rng.randint(0, 3))}


NAME_RULES = ({"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"not": {"const": "c"}}, {"maxLength": 1})
CONDITIONS = (("if", "then"), ("if", "else"), ("if", "then", "else"))
RULES = (
    lambda rng, _: {"enum": rng.sample(FEW_VALUES, rng.randint(1, 6))},
    lambda rng, _: {"const": rng.choice(FEW_VALUES)},
    lambda rng, _: {rng.choice(("minimum", "exclusiveMinimum")): rng.randint(-1, 2)},
    lambda rng, _: {rng.choice(("maximum", "exclusiveMaximum")): rng.randint(1, 4)},
    lambda rng, _: {"minLength": rng.randint(0, 2)},
    lambda rng, _: {"maxLength": rng.randint(0, 2)},
    lambda rng, _: {"pattern": rng.choice(("^a", "b$", "^a?b?$"))},
    lambda rng, depth: {"properties": {name: random_rules(rng, depth) for name in rng.sample(FEW_NAMES, 2)}},
    lambda rng, depth: {"properties": {"a": random_rules(rng, depth)}, "additionalProperties": False},
    lambda rng, depth: {"additionalProperties": random_rules(rng, depth)},
    lambda rng, _: {"required": rng.sample(FEW_NAMES, rng.randint(1, 2))},
    lambda rng, _: {"minProperties": 1} if rng.random() < 0.5 else {"maxProperties": rng.randint(0, 2)},
    lambda rng, depth: {"patternProperties": {"^[ab]$": random_rules(rng, depth)}},
    lambda rng, _: {
        "propertyNames": rng.choice(({"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"not": {"const": "c"}}))
    },
    lambda rng, _: {"dependentRequired": {"a": ["b"]}},
    lambda rng, depth: {"dependentSchemas": {"b": random_rules(rng, depth)}},
    lambda rng, depth: {"items": random_rules(rng, depth)},
    lambda rng, depth: {"prefixItems": [random_rules(rng, depth)], "items": rng.random() < 0.5},
    lambda rng, _: {"minItems": rng.randint(0, 2)},
    lambda rng, _: {"maxItems": rng.randint(0, 2)},
    lambda rng, depth: {"contains": random_rules(rng, depth), **({"maxContains": 1} if rng.random() < 0.3 else {})},
    lambda rng, _: {"uniqueItems": True, "items": {"enum": rng.sample(FEW_VALUES[:10], 3)}},
    lambda rng, depth: {"not": random_rules(rng, depth)},
    lambda rng, depth: {"allOf": [random_rules(rng, depth) for _ in range(2)]},
    lambda rng, depth: {"anyOf": [random_rules(rng, depth) for _ in range(2)]},
    lambda rng, depth: {"oneOf": [random_rules(rng, depth) for _ in range(2)]},
    lambda rng, depth: {
        key: random_rules(rng, depth)
        for key in (("if", "then"), ("if", "else"), ("if", "then", "else"))[rng.randrange(3)]
    },
    lambda rng, depth: {"unevaluatedProperties": random_rules(rng, depth) if rng.random() < 0.3 else False},
    lambda rng, _: {"unevaluatedItems": False},
)

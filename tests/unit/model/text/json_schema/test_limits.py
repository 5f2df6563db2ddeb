"""Intersecting patterns: never counted too high, in time linear in the schema."""

from __future__ import annotations

import time

import pytest

from model.errors import GrammarError
from model.text.grammar import json_grammar
from model.text.json_schema.limits import MAX_INTERSECTING_PATTERNS, MAX_PATTERN_KEYS, intersecting_patterns
from tests.support.hostile_grammars import SCHEMAS

WORD = {"type": "string", "pattern": "x"}


def words(count: int) -> list[dict]:
    return [{"type": "string", "pattern": f"x{i}"} for i in range(count)]


def mixin(*names: str) -> dict:
    return {"properties": {name: {"type": "string", "pattern": name} for name in names}}


@pytest.mark.parametrize(
    ("schema", "num_patterns"),
    [
        (True, 0),
        (WORD, 1),
        ({"properties": {f"p{i}": WORD for i in range(99)}}, 1),
        ({"allOf": words(7)}, 7),
        ({"allOf": [{"items": one} for one in words(7)], "items": WORD}, 8),
        ({"anyOf": [mixin("name") for _ in range(30)]}, 1),
        ({"allOf": [mixin("same", f"own{i}") for i in range(5)]}, 5),
        ({"allOf": [mixin(f"own{i}") for i in range(50)]}, 1),
        ({"anyOf": words(9), "pattern": "y"}, 2),
        ({"anyOf": [True, *words(9)], "pattern": "y"}, 1),
        ({"$ref": "#/$defs/a", "pattern": "y", "$defs": {"a": {"$ref": "#/$defs/b", "pattern": "z"}, "b": WORD}}, 3),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}, "b": WORD}}}}, 1),
        ({"$ref": "#", "pattern": "y"}, 1),
        ({"$ref": "elsewhere", "pattern": "y"}, 1),
    ],
)
def test_what_meets_is_counted(schema, num_patterns):
    assert intersecting_patterns(schema) == (num_patterns, 0)


@pytest.mark.parametrize("name", ["allOf", "in items", "in properties", "behind references", "anyOf beside"])
def test_what_meets_too_often_is_refused_at_once(name):
    begin_s = time.thread_time()
    with pytest.raises(GrammarError, match="patterns"):
        json_grammar(SCHEMAS[name](1))
    assert time.thread_time() - begin_s < 0.2


def test_the_most_allowed_is_accepted():
    json_grammar({"allOf": words(MAX_INTERSECTING_PATTERNS)})
    json_grammar({"patternProperties": {f"^{i}$": True for i in range(MAX_PATTERN_KEYS // 2)}})


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"allOf": [{}] * 3} for _ in range(5000)], "allOf": [{"x": 1} for _ in range(3000)]},
        {"properties": {f"p{i}": WORD for i in range(10_000)}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 5000}}, "$ref": "#/$defs/a"},
        {"allOf": [{"$ref": "#" + "/allOf" * 500} for _ in range(1000)]},
    ],
)
def test_it_takes_no_time_whatever_the_schema(schema):
    begin_s = time.thread_time()
    intersecting_patterns(schema)
    assert time.thread_time() - begin_s < 2.0

"""JSON Schema: each keyword is enforced or refused by its name, alone and next to any other."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest

from model.errors import GrammarError
from model.text.grammar import json_grammar
from model.text.grammar_matcher import GrammarCompiler
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.formats import HERMES, calls_grammar
from model.text.tool_calls.reader import Function
from tests.support.call_specs import spec_of
from tests.support.random_schemas import random_rules, random_value
from tests.support.schema_validator import is_valid

DEMO = Path(__file__).parents[5] / "model" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(DEMO)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 4101, [1])


@pytest.fixture(scope="module")
def accepts(compiler, tokenizer):
    by_byte = {tokenizer.token_bytes(token): token for token in range(300) if len(tokenizer.token_bytes(token)) == 1}

    def accepts(matcher, text: str) -> bool:
        matcher = matcher.copy()
        fits = matcher.advance([by_byte[bytes([byte])] for byte in text.encode()])
        return fits and not matcher.has_failed and matcher.is_complete

    return accepts


COLOUR = {"enum": ["red", "green", "blue"]}
CAT = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]}
DOG = {"properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]}
CASES = {
    "type": ({"type": ["integer", "null"]}, [1, None], ["1", 1.5, True]),
    "enum": ({"enum": [1, "a", None, [1], {"a": 1}]}, [1, "a", None, [1], {"a": 1}], [2, "b", [], {}, True]),
    "enum next to type": ({"type": "string", "enum": ["a", 1]}, ["a"], [1, "b"]),
    "enum next to const": ({"enum": [1, 2], "const": 2}, [2], [1, 3]),
    "minimum": ({"minimum": 2}, [2, 3, "x"], [1, 1.5]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 2}, [1, 1.9, -5], [2, 2.0, 3]),
    "exclusiveMinimum of draft 4": (
        {"minimum": 1, "allOf": [True], "exclusiveMinimum": True, "type": "number"}, [1.5, 2], [1, 0]),
    "bounds of 64-bit integers": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-5, 2**62, -(2**62)], [2**63, -(2**63) - 1]),
    "bounds of an unsigned integer": ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1, 2**64]),
    "multipleOf": ({"multipleOf": 3}, [0, 3, -6], [1, 4]),
    "lengths": ({"minLength": 1, "maxLength": 2}, ["a", "日本", 1], ["", "abc"]),
    "pattern": ({"pattern": "^a"}, ["ab", 1], ["b"]),
    "prefixItems": ({"prefixItems": [{"type": "integer"}], "items": False}, [[1], [], 1], [["a"], [1, 2]]),
    "prefixItems next to additionalItems": (
        {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False}, [["a"], ["a", 1]], [[1]]),
    "items of draft 7": ({"items": [{"type": "integer"}], "anyOf": [True], "additionalItems": False}, [[1]], [[1, 2]]),
    "minItems": ({"minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    "contains": ({"type": "array", "contains": {"const": 5}, "maxItems": 4}, [[5], [1, 5], [1, 2, 3, 5]], [[], [1]]),
    "contains, any size": ({"contains": {"const": 5}}, [[5], [1, 5, 2], "x"], [[], [1]]),
    "minContains": ({"contains": {"const": 5}, "minContains": 2}, [[5, 5], [5, 1, 5]], [[5], [5, 1]]),
    "maxContains": ({"contains": {"const": 5}, "maxContains": 1}, [[5], [1, 5]], [[5, 5], [1]]),
    "minContains of 0": ({"contains": {"const": 5}, "minContains": 0}, [[], [1]], []),
    "uniqueItems": ({"items": COLOUR, "uniqueItems": True}, [["red"], ["blue", "red"], []], [["red", "red"], ["x"]]),
    "uniqueItems of one": ({"uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    "uniqueItems of a tuple": (
        {"prefixItems": [{"type": "string"}, {"type": "null"}], "items": False, "uniqueItems": True},
        [["a", None], []], [["a", "a"], ["a", None, 1]]),
    "properties": ({"properties": {"a": {"type": "integer"}}}, [{"a": 1}, {"b": "x"}, 1], [{"a": "x"}]),
    "required": ({"required": ["a"]}, [{"a": 1}, []], [{}, {"b": 1}]),
    "additionalProperties": ({"properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
    "patternProperties": ({"patternProperties": {"^x": {"type": "integer"}}}, [{"x": 1}, {"a": "b"}], [{"xy": "b"}]),
    "patternProperties behind additionalProperties": (
        {"additionalProperties": False, "anyOf": [True], "patternProperties": {"^x": {}}}, [{"x": 1}], [{"y": 1}]),
    "minProperties": (
        {"properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "b": 1}], [{}]),
    "minProperties of a closed object": (
        {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2},
        [{"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}], [{}, {"a": 1}]),
    "maxProperties": (
        {"properties": {"a": {}, "b": {}}, "maxProperties": 1},
        [{}, {"a": 1}, {"c": 1}], [{"a": 1, "b": 1}, {"a": 1, "c": 1}]),
    "propertyNames": ({"propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}, {}], [{"c": 1}]),
    "propertyNames of a pattern": ({"propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
    "propertyNames of a length": ({"propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    "propertyNames next to properties": (
        {"properties": {"ab": {}, "c": {"type": "null"}}, "propertyNames": {"pattern": "^c"}},
        [{"c": None}, {"cd": 1}], [{"ab": 1}, {"c": 1}, {"d": 1}]),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, [{}, {"a": 1, "b": 1}, {"b": 1}], [{"a": 1}]),
    "dependentSchemas": (
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"b": "x"}, {"a": 1, "b": 1}, {"a": 1}], [{"a": 1, "b": "x"}]),
    "dependencies": (
        {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, [{"a": 1, "b": 1}, {}], [{"a": 1}, {"c": 1}]),
    "not of a value": ({"not": {"const": "ab"}}, ["a", "abc", "", 1, {}], ["ab"]),
    "not of values": ({"type": "integer", "not": {"enum": [1, 2]}}, [0, 3, -7], [1, 2]),
    "not of a type": ({"not": {"type": ["string", "object"]}}, [1, 2.5, None, []], ["a", {}]),
    "not of a length": ({"type": "string", "not": {"minLength": 2}}, ["", "a"], ["ab"]),
    "not of required": ({"type": "object", "not": {"required": ["a", "b"]}}, [{"a": 1}, {}], [{"a": 1, "b": 1}]),
    "not of an object": (
        {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, [{"a": 2}, {}], [{"a": 1}, 1]),
    "not of a reference": (
        {"$defs": {"x": {"type": "string", "maxLength": 1}}, "not": {"$ref": "#/$defs/x"}}, ["ab", 1], ["a", ""]),
    "not of not": ({"not": {"not": {"type": "string"}}}, ["a"], [1]),
    "not of contains": ({"type": "array", "not": {"contains": {"const": 1}}}, [[], [2]], [[1], [2, 1]]),
    "if": (
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]},
         "else": {"required": ["c"]}},
        [{"a": 1, "b": 1}, {"c": 1}], [{"a": 1, "c": 1}, {"a": 2, "b": 1}, {}]),
    "if by if": (
        {"allOf": [{"if": {"properties": {"k": {"const": v}}, "required": ["k"]}, "then": {"required": [f"x{v}"]}}
                   for v in range(20)], "required": ["k"], "type": "object"},
        [{"k": 3, "x3": 0}, {"k": 30}], [{"k": 3}, {"k": 3, "x4": 0}]),
    "anyOf": ({"anyOf": [{"type": "string"}, {"minimum": 5}]}, ["a", 5, None], [4]),
    "allOf": ({"allOf": [{"minimum": 5}, {"maximum": 7}]}, [5, 7, "x"], [4, 8]),
    "oneOf of types": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 1.5]),
    "oneOf of many constants": (
        {"oneOf": [{"const": f"v{i}", "title": f"The {i}th"} for i in range(700)]}, ["v0", "v699"], ["v700", 1]),
    "oneOf of the same constants": ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, [1, 3], [2, 4]),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}, [2, 6], [3, 5]),
    "oneOf of objects": ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "cat"}, {}]),
    "oneOf of required": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    "oneOf of patterns": ({"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, ["a", "b"], ["c"]),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
        [{"a": 1}, {"b": 1}, {}], [{"c": 1}]),
    "unevaluatedProperties behind anyOf": (
        {"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}
                   ], "unevaluatedProperties": False},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 2, "b": 1}, {"a": 1, "c": 1}]),
    "unevaluatedProperties behind if": (
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"properties": {"b": {}}},
         "unevaluatedProperties": {"type": "null"}},
        [{"a": 1, "b": 2}, {"a": None}], [{"a": 2}, {"a": 1, "c": 1}]),
    "unevaluatedItems": (
        {"allOf": [{"prefixItems": [{"type": "integer"}]}], "unevaluatedItems": False}, [[1], []], [[1, 2], ["a"]]),
    "references": (
        {"$id": "https://example.com/a", "$ref": "b#x", "$defs": {"b": {"$id": "b", "$defs": {
            "x": {"$anchor": "x", "type": "integer"}}}}}, [1], ["a"]),
    "references to themselves": (
        {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        [{"next": {"next": {}}}], [{"next": {"a": 1}}]),
    "siblings of a reference": (
        {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 3}, [3], [2, "a"]),
    "conjunctions in a circle": (
        {"$defs": {"a": {"properties": {"b": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}]}}},
                   "c": {"properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}}, "$ref": "#/$defs/a"},
        [{}], [{"b": {}}, {"b": {"b": {}}}]),
    "what allows nothing, elsewhere": (
        {"$defs": {"no": {"allOf": [{"type": "string"}, {"type": "null"}]}},
         "properties": {"a": {"$ref": "#/$defs/no"}, "b": {"anyOf": [{"$ref": "#/$defs/no"}, {"type": "null"}]}}},
        [{}, {"b": None}], [{"a": "x"}, {"b": "x"}]),
    "unknown words": ({"type": "string", "x-note": {"not": {}}, "nullable": True, "deprecated": True}, ["a"], [None]),
    "names that are keywords": (
        {"properties": {"not": {"type": "integer"}, "$ref": {"type": "string"}}, "additionalProperties": False},
        [{"not": 1, "$ref": "x"}], [{"not": "a"}]),
}  # fmt: skip


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_keyword(compiler, accepts, case, lenient):
    schema, allowed, forbidden = CASES[case]
    matcher = compiler.compile(json_grammar(schema, lenient=lenient))
    for value in allowed:
        assert accepts(matcher, json.dumps(value, ensure_ascii=False)), value
    for value in forbidden:
        assert not accepts(matcher, json.dumps(value, ensure_ascii=False)), value
    if case != "references":
        assert all(is_valid(value, schema) for value in allowed)
        assert not any(is_valid(value, schema) for value in forbidden)


@pytest.mark.parametrize("case", CASES)
def test_each_keyword_of_a_function(tokenizer, compiler, accepts, case):
    schema, allowed, forbidden = CASES[case]
    definitions = {} if case in ("references", "references to themselves") else {"$defs": schema.get("$defs", {})}
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], **definitions}
    if "references" in case and "sibling" not in case:
        return
    for is_strict in (False, True):
        grammar = calls_grammar(spec_of(HERMES, [Function("f", parameters, is_strict)], max_calls=1), tokenizer)
        matcher = compiler.compile(grammar)
        for values, is_right in ((allowed, True), (forbidden, False)):
            for value in values:
                call = json.dumps({"name": "f", "arguments": {"x": value}}, ensure_ascii=False)
                assert accepts(matcher, f"<tool_call>\n{call}\n</tool_call>") == is_right, value


DEEP = {"properties": {"a/b": {"items": {"uniqueItems": True}}}}
REFUSED = {
    "uniqueItems": ({"uniqueItems": True}, "#"),
    "uniqueItems in here": (DEEP, "#/properties/a~1b/items"),
    "not": ({"not": {"pattern": "a"}}, "'pattern' at '#/not'"),
    "not of an integer": ({"not": {"type": "integer"}}, "'type' at '#/not'"),
    "not of multipleOf": ({"type": "integer", "not": {"multipleOf": 2}}, "'multipleOf' at '#/not'"),
    "if": ({"if": {"pattern": "a"}, "then": {"minLength": 1}}, "'pattern' at '#/if'"),
    "oneOf": ({"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "'oneOf' at '#'"),
    "minProperties": ({"minProperties": 2}, "'minProperties' at '#'"),
    "propertyNames": ({"propertyNames": {"pattern": "a", "minLength": 2}}, "'propertyNames' at '#'"),
    "maxContains": ({"contains": {"pattern": "a"}, "maxContains": 0}, "'maxContains' at '#/contains'"),
    "unevaluatedItems": ({"contains": {"const": 1}, "unevaluatedItems": False}, "'unevaluatedItems' at '#'"),
    "$ref": ({"$ref": "https://example.com/x"}, "'$ref' at '#'"),
    "$ref to nowhere": ({"items": {"$ref": "#/$defs/x"}}, "'$ref' at '#/items'"),
    "$ref to itself": ({"$ref": "#"}, "'$ref'"),
    "$ref in a circle": (
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}, "'$ref'"),
    "$dynamicRef": (
        {"$dynamicAnchor": "x", "$defs": {"y": {"$dynamicAnchor": "x"}}, "items": {"$dynamicRef": "#x"}},
        "'$dynamicRef' at '#/items'"),
    "type": ({"type": "any"}, "'type' at '#'"),
    "required": ({"properties": {"a": {"required": True}}}, "'required' at '#/properties/a'"),
    "minimum": ({"minimum": "1"}, "'minimum' at '#'"),
    "large multipleOf": ({"multipleOf": 2**53 + 1}, "'multipleOf'"),
    "large minimum under not": ({"not": {"minimum": 2**53 + 1}}, "'minimum' at '#/not'"),
    "large enum": ({"enum": [[2**60 + 1]]}, "'enum' at '#'"),
    "minLength": ({"minLength": -1}, "'minLength' at '#'"),
    "control character": ({"const": "a\x00"}, "'const' at '#'"),
    "control character in a pattern": ({"pattern": "a\\x00b"}, "'pattern' at '#'"),
}  # fmt: skip


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(tokenizer, case, lenient):
    schema, named = REFUSED[case]
    with pytest.raises(GrammarError) as caught:
        json_grammar(schema, lenient=lenient)
    assert named in str(caught.value)
    with pytest.raises(GrammarError, match="'f'"):
        calls_grammar(spec_of(HERMES, [Function("f", schema, not lenient)], max_calls=1), tokenizer)


def test_a_format_is_a_comment_only_where_it_is_not_known_and_not_strict():
    schema = {"type": "string", "format": "phone number"}
    assert json_grammar(schema, lenient=True)
    with pytest.raises(GrammarError, match="'format' at '#'"):
        json_grammar(schema)


def test_a_property_cannot_be_had_by_another_spelling(compiler, accepts):
    matcher = compiler.compile(json_grammar({"properties": {"a": {"type": "integer"}}}))
    assert accepts(matcher, '{"a": 1}')
    assert not accepts(matcher, '{"\\u0061": "x"}')


def test_products_of_keywords_are_bounded():
    choices = [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(9)]} for i in range(9)]
    wide = {"anyOf": [{"required": [f"p{i}"]} for i in range(60)]}
    for schema in (
        {"type": "object", "allOf": choices},
        {"oneOf": [{"properties": {f"p{i}": {"type": "integer"}}} for i in range(20)]},
        {"unevaluatedProperties": False, "allOf": [wide] * 8},
        {"not": {"oneOf": [wide] * 40}},
    ):  # fmt: skip
        with contextlib.suppress(GrammarError):
            assert len(json_grammar(schema)) < 1 << 20


NUM_SEEDS = 125


@pytest.mark.parametrize("part", range(4))
def test_what_any_schema_lets_through_is_valid(compiler, accepts, part):
    num_allowed = num_missed = num_compiled = 0
    for seed in range(part * NUM_SEEDS, (part + 1) * NUM_SEEDS):
        rng = random.Random(seed)
        schema = random_rules(rng)
        try:
            matcher = compiler.compile(json_grammar(schema, lenient=bool(seed % 2)))
        except GrammarError:
            continue
        num_compiled += 1
        for _ in range(20):
            value = random_value(rng)
            allowed, fits = accepts(matcher, json.dumps(value)), is_valid(value, schema)
            assert fits or not allowed, (seed, value, schema)
            num_allowed += fits
            num_missed += fits and not allowed
    assert num_compiled > NUM_SEEDS * 0.7  # others allow nothing at all
    assert num_missed < num_allowed * 0.06  # other orders of properties, and what `oneOf` and `contains` leave out

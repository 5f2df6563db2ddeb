"""Calls in Qwen3-Coder's XML: their values as JSON, streamed, and enforced by schemas."""

from __future__ import annotations

import json
import re

import pytest

from model.errors import GrammarError
from model.text.grammar_matcher import GrammarCompiler
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.formats import QWEN3_CODER, calls_grammar
from model.text.tool_calls.reader import Function
from model.text.tool_calls.stream import ArgumentsDelta, CallStart, ToolCallStream
from tests.support.call_specs import spec_of
from tests.support.make_tokenizers import qwen_style
from tests.unit.model.text.tool_calls.test_formats import CALL, read

SCHEMAS = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "n": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/list"}]},
            "deep": {"enum": [True, 2, "x"]},
            "maybe": {"type": ["string", "null"]},
        },
        "$defs": {"list": {"type": "array"}},
    },
    "stop": None,
}
XML = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\n서울 "x"\n\\ </parameter\n</parameter>\n'
    '<parameter=n>\n[1, {"a": 2}]\n</parameter>\n</function>\n</tool_call>'
)

WEATHER = ("get_weather", '{"city": "서울 \\"x\\"\\n\\\\ </parameter", "n": [1, {"a": 2}]}')


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


READINGS = [
    (XML, "", [WEATHER]),
    (f"I look.\n{XML}\n{xml('stop')}\n", "I look.", [WEATHER, ("stop", "{}")]),
    ("<tool_call><function=stop></function></tool_call> So.", " So.", [("stop", "{}")]),
    (xml("stop", a="1", b=""), "", [("stop", '{"a": "1", "b": ""}')]),
    (xml("get_weather", n="3"), "", [("get_weather", '{"n": 3}')]),
    (xml("get_weather", n="three"), "", [("get_weather", '{"n": "three"}')]),
    (xml("get_weather", deep="True"), "", [("get_weather", '{"deep": true}')]),
    (xml("get_weather", deep="2.5"), "", [("get_weather", '{"deep": "2.5"}')]),
    (xml("get_weather", maybe="null"), "", [("get_weather", '{"maybe": null}')]),
    (xml("get_weather", maybe="7"), "", [("get_weather", '{"maybe": "7"}')]),
    (XML[:60], "", [("get_weather", '{"city": "서울 \\"x\\"\\n\\\\')]),
    (xml("rm"), None, []),
    (f"<tool_call>\n{CALL}\n</tool_call>", None, []),
    ("<tool_call>\n<function=stop>\nwhat</function>", None, []),
    ("<tool_call>\n<func", None, []),
    (f"<tool_call>\n<function={'x' * 300}>", None, []),
]


@pytest.mark.parametrize(("text", "content", "calls"), READINGS)
def test_readings(text, content, calls):
    received = read("qwen3_coder", [text], SCHEMAS)
    assert received == (text if content is None else content, calls)
    assert read("qwen3_coder", list(text), SCHEMAS) == received
    for size in (2, 3, 7):
        assert read("qwen3_coder", [text[i : i + size] for i in range(0, len(text), size)], SCHEMAS) == received


def test_a_text_is_sent_while_it_comes():
    stream = ToolCallStream(QWEN3_CODER.syntax, SCHEMAS)
    assert stream.push("<tool_call>\n<function=get_weather>\n<parameter") == []
    assert stream.push("=city>\nOs") == [CallStart(0, "get_weather"), ArgumentsDelta(0, '{"city": "Os')]
    assert stream.push("lo\n</para") == [ArgumentsDelta(0, "lo")]
    assert stream.push("meter>\n") == [ArgumentsDelta(0, '"')]
    assert stream.push("</function></tool_call>") == [ArgumentsDelta(0, "}")]
    assert stream.flush() == []


def test_long_values_take_no_long_time():
    text = "<" * 400_000
    assert read("qwen3_coder", [xml("stop", a=text)])[1] == [("stop", json.dumps({"a": text}))]


MANY = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 5},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "ref": {"$ref": "#/$defs/kind"},
        "any": {},
    },
    "required": ["kind", "count", "ref"],
    "$defs": {"kind": {"const": "c"}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("qwen")
    qwen_style(folder)
    return Tokenizer.read(folder)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens as a model writes them: markers by their own tokens."""
    ids: list[int] = []
    for part in re.split(r"(</?tool_call>)", text):
        special = tokenizer.special_id(part)
        ids += tokenizer.encode(part, False) if special is None else [special]
    return ids


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (xml("f", kind="a", count="4", ref="c"), True),
        (xml("f", text="a\n<b> \n", kind="b", count="3", list="[true, false]", ref="c", any="{}"), True),
        (xml("f", kind="c", count="4", ref="c"), False),
        (xml("f", kind="a", count="6", ref="c"), False),
        (xml("f", kind="a", count="4"), False),
        (xml("f", kind="a", count="4", ref="d"), False),
        (xml("f", kind="a", count="4", ref="c", more="1"), False),
        (xml("g"), False),
    ],
)
def test_parameters_are_held_to_their_schema(tokenizer, text, is_right):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    grammar = calls_grammar(spec_of(QWEN3_CODER, [Function("f", MANY, True)], max_calls=1), tokenizer)
    matcher = compiler.compile(grammar)
    assert (matcher.advance(ids_of(tokenizer, text)) and matcher.is_complete) == is_right


def test_a_function_that_is_not_strict_takes_any_parameters_where_it_need_not_be_called(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    grammar = calls_grammar(spec_of(QWEN3_CODER, [Function("f", MANY)], or_text=True), tokenizer)
    assert compiler.compile(grammar).advance(ids_of(tokenizer, "Yes. " + xml("f", more="1", other="<x>")))
    assert not compiler.compile(grammar).advance(ids_of(tokenizer, xml("g", more="1")))


ONE = {"type": "object", "required": ["a"]}
ENFORCED = [
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
    ({"type": "string", "pattern": "x"}, ["axb\n"], ["ab"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
    ({"type": "string"}, ["any\n<text> ", ""], ["a</parameter>", "a<function=f>"]),
    ({"enum": ["red", 5, None]}, ["red", "5", "null"], ["blue", "6"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", "a"], []),
    ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 2}]}, ["1", "4"], ["2", "3"]),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[1, 2]"], ["[1, 1]"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), ENFORCED)
def test_every_keyword_of_a_parameter_is_enforced(tokenizer, schema, right, wrong):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    function = Function("f", {**ONE, "properties": {"a": schema}}, True)
    grammar = calls_grammar(spec_of(QWEN3_CODER, [function], max_calls=1), tokenizer)
    for text in (*right, *wrong):
        matcher = compiler.compile(grammar)
        fits = matcher.advance(ids_of(tokenizer, xml("f", a=text))) and matcher.is_complete
        assert fits == (text in right), text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "'format' at '#/properties/a'"),
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 5}}}, "'type' at '#/properties/a'"),
        ({"properties": {"a": {"enum": ["5", 5]}}}, "'enum' at '#/properties/a'"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "'pattern' at '#/properties/a'"),
        ({"properties": {"a": {}}, "minProperties": 1}, "'minProperties' at '#'"),
        ({"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, "'dependentRequired' at '#'"),
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf' at '#'"),
        ({"patternProperties": {"a": {}}}, "'patternProperties' at '#'"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(tokenizer, schema, named):
    with pytest.raises(GrammarError) as caught:
        calls_grammar(spec_of(QWEN3_CODER, [Function("f", schema, True)]), tokenizer)
    assert named in str(caught.value)

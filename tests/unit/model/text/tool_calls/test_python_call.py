"""Calls written in Python: their literals as JSON, streamed, and enforced by schemas."""

from __future__ import annotations

import ast
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import GrammarError
from model.text.grammar_matcher import GrammarCompiler
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.formats import CALL_FORMATS, PYTHONIC, calls_grammar, detect_format
from model.text.tool_calls.python_call import MAX_DEPTH
from model.text.tool_calls.reader import Function
from model.text.tool_calls.stream import ArgumentsDelta, CallStart, ToolCallStream
from tests.support.call_specs import spec_of
from tests.support.make_tokenizers import llama3_style
from tests.support.num_examples import num_examples
from tests.unit.model.text.tool_calls.test_resync import SCHEMAS, check


def of_value(text: str) -> str | None:
    """Return a value as JSON, None if it makes no call."""
    content, calls = check("pythonic", f"[stop(a={text})]", [len(text) // 2])
    if not calls:
        return None
    assert content == ""
    ((_, arguments),) = calls
    assert arguments.startswith('{"a": ')
    return arguments[6:-1]


VALUES = [
    ("3", "3"), ("-2.5e3", "-2.5e3"), ("1_000", "1000"), (".5", "0.5"), ("+7", "7"), ("0x1F", "31"), ("2.", "2.0"),
    ("True", "true"), ("False", "false"), ("None", "null"), ("true", "true"), ("null", "null"),
    ("'it'", '"it"'), ('"it"', '"it"'), ("''", '""'), ('"it\'s"', '"it\'s"'), ("'it\\'s'", '"it\'s"'),
    ("'\\n\\t\\\\\\x41\\u00e4\\U0001F600\\101\\d'", '"\\n\\t\\\\AäAB"'.replace("äAB", "ä😀A\\\\d")),
    ("'\\ud83d\\ude00'", '"😀"'), ("'a\nb'", '"a\\nb"'), ("'''a'b\n'''", '"a\'b\\n"'), ("'서울]) \"'", '"서울]) \\""'),
    ("[]", "[]"), ("{}", "{}"), ("()", "[]"), ("(1)", "1"), ("(1,)", "[1]"), ("((1, 2), ('a'))", '[[1, 2], "a"]'),
    ("[1, [2,  {'k':None}],]", '[1, [2, {"k": null}]]'),
    ("{1: 'a', True: (), 'x': {}}", '{"1": "a", "true": [], "x": {}}'),
    ("[\n  1,\n  2\n]", "[1, 2]"),
    ("b'z'", None), ("x", None), ("f()", None), ("1+1", None), ("1e999", None), ("nan", None), ("{1, 2}", None),
    ("'\\ud83d'", None), ("'\\uzz'", None), ("'\\N{DASH}'", None), ("'a' 'b'", None), ("[1", None), ("[1 2]", None),
    ("{'a': }", None), ("{[1]: 2}", None), ("-", None), ("", None), ("1, 2", None), ("1, a=2", None),
    ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "meaning"), VALUES)
def test_values(text, meaning):
    assert of_value(text) == meaning


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=num_examples(200), deadline=None, database=None)
@given(literals)
def test_any_literal_means_what_python_says(value):
    written = of_value(repr(value))
    assert json.loads(written) == json.loads(json.dumps(ast.literal_eval(repr(value))))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[get_weather(city='Oslo', days=3), stop()]", "", [("get_weather", '{"city": "Oslo", "days": 3}'), "stop"]),
        ("<|python_start|>[stop()]<|python_end|>", "", ["stop"]),
        ("<function_calls>\nstop()\nget_weather(city='a')\n</function_calls>", "",
         ["stop", ("get_weather", '{"city": "a"}')]),
        ("<|tool_call_start|>[stop()]<|tool_call_end|> Done.", " Done.", ["stop"]),
        ("[stop()]\n[stop()]", "", ["stop", "stop"]),
        ("[ stop ( ) , stop( a = 1 , ) ]", "", ["stop", ("stop", '{"a": 1}')]),
        ("[stop()] and that is all", " and that is all", ["stop"]),
        ("[rm(path='[stop()]')]", "[rm(path='[stop()]')]", []),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[stop", "[stop", []),
        ("[stop('x')]", "[stop('x')]", []),
        ("stop()", "stop()", []),
    ],
)  # fmt: skip
def test_readings(text, content, calls):
    assert check("pythonic", text) == (content, [(call, "{}") if isinstance(call, str) else call for call in calls])


def test_arguments_are_sent_while_they_come():
    stream = ToolCallStream(PYTHONIC.syntax, SCHEMAS)
    assert stream.push("[get_weather(ci") == []
    assert stream.push("ty='Os") == [CallStart(0, "get_weather"), ArgumentsDelta(0, '{"city": "Os')]
    assert stream.push("lo', x=(1") == [ArgumentsDelta(0, 'lo", "x": ')]  # no tuple before its comma
    assert stream.push(", Tr") == [ArgumentsDelta(0, "[1, ")]
    assert stream.push("ue))") == [ArgumentsDelta(0, "true]}")]
    assert stream.push("]") == stream.flush() == []


def test_the_form_of_a_template():
    assert detect_format("like [func_name1(params_name1=params_value1, ...), func_name2(params)]") is PYTHONIC
    assert detect_format("<function_calls>\n{{ calls }}</function_calls>") is PYTHONIC
    assert detect_format("{{ messages[0] }} {%- set x = dict(a=1) %} [INST]") is not PYTHONIC
    assert detect_format("<tool_call> like [f(a=1)]") is CALL_FORMATS["hermes"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama")
    llama3_style(folder)
    return Tokenizer.read(folder)


MANY = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "on": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 3, "maximum": 5},
        "list": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "ref": {"$ref": "#/$defs/kind"},
        "maybe": {"type": ["integer", "null"]},
    },
    "required": ["on", "count"],
    "additionalProperties": False,
    "$defs": {"kind": {"const": "c"}},
}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("[f(on=True, count=4)]", True),
        ('[f(text="a\\n\\"b\\"", on=False, count=3, list=["a", "b"], ref="c", maybe=None)]', True),
        ("[f(on=True, count=4), f(on=True, count=5)]", True),
        ("[f(count=4)]", False),
        ("[f(on=1, count=4)]", False),
        ("[f(on=True, count=6)]", False),
        ('[f(on=True, count=4, list=["c"])]', False),
        ('[f(on=True, count=4, ref="d")]', False),
        ("[f(on=True, count=4, more=1)]", False),
        ("[g()]", False),
        ("hello", False),
    ],
)
def test_arguments_are_held_to_their_schema(tokenizer, text, is_right):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    matcher = compiler.compile(calls_grammar(spec_of(PYTHONIC, [Function("f", MANY, True)], max_calls=2), tokenizer))
    assert (matcher.advance(tokenizer.encode(text, False)) and matcher.is_complete) == is_right


@pytest.mark.parametrize(
    ("form", "text", "is_right"),
    [
        ("pythonic", "Any text, [f(", True),
        ("pythonic", "[f(a='it', b=[1, {\"k\": None}])] So", False),
        ("pythonic", "[f(a='it', b=[1, {\"k\": None}])]", True),
        ("pythonic", "[g(", False),
        ("pythonic", "[1, 2]", False),
        ("pythonic_anywhere", "See [1]: [f(a='it')] and", True),
        ("pythonic_anywhere", "See [1]: [g(", False),
        ("llama3_json_anywhere", 'A {1} {"name": "f", "arguments": {"a": 1}} so', True),
        ("llama3_json_anywhere", 'A {1} {"name": "g"', False),
    ],
)
def test_text_around_calls_hides_none(tokenizer, form, text, is_right):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    grammar = calls_grammar(spec_of(CALL_FORMATS[form], [Function("f", {})], or_text=True), tokenizer)
    assert compiler.compile(grammar).advance(tokenizer.encode(text, False)) == is_right


def test_what_python_cannot_name_is_refused(tokenizer):
    schema = {"properties": {"a b": {"type": "string"}}, "required": ["a b"]}
    with pytest.raises(GrammarError):
        calls_grammar(spec_of(PYTHONIC, [Function("f", schema, True)]), tokenizer)
    calls_grammar(spec_of(PYTHONIC, [Function("f", {**schema, "required": []}, True)]), tokenizer)
    many = {"properties": {f"a{i}": {} for i in range(129)}}
    with pytest.raises(GrammarError):
        calls_grammar(spec_of(PYTHONIC, [Function("f", many, True)]), tokenizer)


def test_broken_lists_lose_no_valid_call():
    rng = random.Random(1)
    good, bad = ["stop()", "get_weather(city='a, b(')"], ["rm(x=1)", "stop(x=)", "stop(1)", "stop(a='x 'y')"]
    for _ in range(200):
        parts = [rng.choice(good + bad) for _ in range(rng.randrange(1, 6))]
        _, calls = check("pythonic", f"[{', '.join(parts)}]", [rng.randrange(9)])
        assert [name for name, _ in calls] == [part.partition("(")[0] for part in parts if part in good]

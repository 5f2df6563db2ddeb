"""Function calls in each format: separated from text however it is split, and enforced by a grammar."""

from __future__ import annotations

import contextlib
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import GrammarError
from model.text.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from model.text.grammar_matcher import GrammarCompiler
from model.text.tokenizer import Tokenizer
from model.text.tool_calls.formats import (
    CALL_FORMATS,
    GRANITE,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PHI4_MINI_JSON,
    QWEN3_CODER,
    SEED_OSS,
    calls_grammar,
    detect_arguments_key,
    detect_format,
)
from model.text.tool_calls.reader import Function
from model.text.tool_calls.stream import ArgumentsDelta, CallStart, TextDelta, ToolCallStream
from tests.support import make_tokenizers
from tests.support.call_specs import spec_of
from tests.support.num_examples import num_examples

NAMES = ("get_weather", "stop")
WEATHER = '{"city": "서울 \\"x\\" {]", "n": [1, {"a": "}"}]}'
CALL = f'{{"name": "get_weather", "arguments": {WEATHER}}}'
STOP = '{"name": "stop", "parameters": {}}'
ONE, BOTH = [("get_weather", WEATHER)], [("get_weather", WEATHER), ("stop", "{}")]

XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
SEED = "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>"

READINGS = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", ONE),
    ("hermes", f"I look. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{STOP}</tool_call>\n", "I look.", BOTH),
    ("hermes", f"<tool_call>{CALL}", "", ONE),
    ("hermes", "a < b, <tool and <tool_call", "a < b, <tool and <tool_call", []),
    ("hermes", "<tool_call>\nnot a call</tool_call> so", "<tool_call>\nnot a call</tool_call> so", []),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    ("hermes", f"<tool_call>{CALL}</tool_call> Done. ", " Done.", ONE),
    ("hermes", CALL, CALL, []),
    ("llama3_json", CALL, "", ONE),
    ("llama3_json", f"<|python_tag|>{CALL}; {STOP}", "", BOTH),
    ("llama3_json", f" \n{CALL}\n", "", ONE),
    ("llama3_json", f"Here: {CALL}", f"Here: {CALL}", []),
    ("llama3_json", '{"a": 1, "b": [2]}', '{"a": 1, "b": [2]}', []),
    ("llama3_json", '{"name": 7, "arguments": {}}', None, []),
    ("llama3_json", "{}", "{}", []),
    ("llama3_json", '{"name": "get_weather"', '{"name": "get_weather"', []),
    ("llama3_json", '{"arguments": {"a": 1}, "name": "stop"}', "", [("stop", '{"a": 1}')]),
    ("llama3_json", '{"name": "stop", "arguments": "{\\"a\\": 1}"}', "", [("stop", '{"a": 1}')]),
    ("llama3_json", '{"type": "function", "name": "stop", "parameters": {"a": -1.5}}', "", [("stop", '{"a": -1.5}')]),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", "  \n", "  \n", []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {STOP}]", "", BOTH),
    ("mistral", f"[TOOL_CALLS] [{CALL}]", "", ONE),
    ("mistral", f"Let me see.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]stop{{}}", "Let me see.", BOTH),
    ("mistral", "[TOOL_CALLS]rm{}", "[TOOL_CALLS]rm{}", []),
    ("granite", f"<|tool_call|>[{CALL}, {STOP}]", "", BOTH),
    ("granite", f"I look. <tool_call> [\n{CALL}]\n", "I look.", ONE),
    ("granite", "<|tool_call|>[1, 2]", "<|tool_call|>[1, 2]", []),
    ("phi4_mini_json", f"functools[{CALL}, {STOP}]", "", BOTH),
    ("phi4_mini_json", f"<|tool_call|>[{CALL}]<|/tool_call|>", "", ONE),
    ("phi4_mini_json", "functools[0] and functools.reduce", "functools[0] and functools.reduce", []),
    ("seed_oss", f"I look.\n{SEED}", "I look.", [("get_weather", '{"city": "Oslo"}')]),
    ("mistral", "an [array], [TOOL", "an [array], [TOOL", []),
]


def read(form: str, pieces: list[str], names=NAMES, max_calls=None) -> tuple[str, list[tuple[str, str]]]:
    """The text of a reply, and its calls."""
    stream = ToolCallStream(
        CALL_FORMATS[form].syntax, names if isinstance(names, dict) else dict.fromkeys(names), max_calls
    )
    news = [one for piece in pieces for one in stream.push(piece)] + stream.flush()
    content, calls = "", []
    for one in news:
        match one:
            case TextDelta(text):
                content += text
            case CallStart(number, name):
                assert number == len(calls)
                calls.append((name, ""))
            case ArgumentsDelta(number, text):
                assert number == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), READINGS)
def test_readings(form, text, content, calls):
    received = read(form, [text])
    assert received == (text if content is None else content, calls)
    assert read(form, list(text)) == received
    for size in (2, 3, 7):
        assert read(form, [text[i : i + size] for i in range(0, len(text), size)]) == received


WORDS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", CALL, STOP, "{", "}", "[", "]", '"',
    XML, "<function=", "stop>", "<parameter=", "</parameter>", "</function>",
    "\\", '"name"', ":", ",", ";", "stop", "\n", " ", "x", '{"name": "stop", "arguments": ',
]  # fmt: skip


@settings(max_examples=num_examples(300), deadline=None, database=None)
@given(
    st.sampled_from(sorted(CALL_FORMATS)),
    st.lists(st.sampled_from(WORDS), max_size=10),
    st.randoms(use_true_random=False),
)
def test_however_it_arrives_it_reads_the_same(form, words, rng):
    text = "".join(words)
    whole = read(form, [text])
    cuts = sorted(rng.sample(range(len(text) + 1), k=min(len(text) + 1, 5)))
    assert read(form, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert all(name in NAMES for name, _ in whole[1])
    if not whole[1]:
        assert whole[0] == text


def test_arguments_are_sent_while_they_come():
    stream = ToolCallStream(HERMES.syntax, dict.fromkeys(NAMES))
    assert stream.push('<tool_call>{"name": "stop", "arg') == []
    assert stream.push('uments": {"a": "b') == [CallStart(0, "stop"), ArgumentsDelta(0, '{"a": "b')]
    assert stream.push('c"}') == [ArgumentsDelta(0, 'c"')]
    assert stream.push("}</tool_call>") == [
        ArgumentsDelta(0, "}")
    ]  # its last bracket says that the whole call is well-formed
    assert stream.flush() == []
    assert stream.num_calls == 1


def test_calls_beyond_the_most_are_dropped():
    assert read("hermes", [f"<tool_call>{CALL}</tool_call><tool_call>{STOP}</tool_call>"], max_calls=1) == ("", ONE)


def test_long_replies_take_no_long_time():
    arguments = json.dumps({"a": "x" * 400_000})
    text = f'<tool_call>{{"name": "stop", "arguments": {arguments}}}</tool_call>'
    assert read("hermes", [text])[1] == [("stop", arguments)]
    assert read("llama3_json", ["y" * 400_000])[0] == "y" * 400_000


def test_the_form_of_a_template():
    folder = Path(__file__).parents[1] / "templates"
    found = {path.stem: detect_format(path.read_text()) for path in folder.glob("*.jinja")}
    assert found["qwen2_5"] is HERMES
    assert found["llama3"] is LLAMA3_JSON
    assert found["mistral"] is MISTRAL
    assert detect_format("<tool_call>\n<function=example>") is QWEN3_CODER
    assert detect_format("respond only with <|tool_call|> followed by a JSON list of tools used") is GRANITE
    assert detect_format("prefix function calls with functools marker") is PHI4_MINI_JSON
    assert detect_format("'<seed:tool_call>' + '\\n<function=' + name") is SEED_OSS
    assert detect_arguments_key((folder / "llama3.jinja").read_text()) == "parameters"
    assert detect_arguments_key((folder / "qwen2_5.jinja").read_text()) == "arguments"


STRICT = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Paris"]}},
}
FUNCTIONS = (
    Function("get_weather", STRICT, True),
    Function("stop", {"type": "object", "properties": {}, "additionalProperties": False}),
)


@pytest.fixture(scope="module", params=["qwen_style", "mistral_style", "llama3_style"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    getattr(make_tokenizers, request.param)(folder)
    return Tokenizer.read(folder)


def walk(tokenizer: Tokenizer, grammar: str, seed: int, start: str = "") -> str:
    """Return a random reply of the grammar that begins with `start`."""
    size = tokenizer.vocab_size
    matcher = GrammarCompiler(tokenizer, size, [size - 1]).compile(grammar)
    rng, ids, words = random.Random(seed), [], np.zeros(-(-size // 32), np.uint32)
    while not matcher.is_finished and len(ids) < 3000:
        assert matcher.fill_mask(words, ())
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        done = tokenizer.decode(ids, skip_special_tokens=False, at_start=False)
        if len(done) < len(start):
            rest = start[len(done) :].encode()
            fitting = [token for token in allowed if rest.startswith(tokenizer.token_bytes(token) or b"\0")]
            allowed = [max(fitting, key=lambda token: len(tokenizer.token_bytes(token)))]  # markers by their own token
        elif matcher.is_complete and (rng.random() < 0.2 or not allowed):
            break
        token = rng.choice(allowed)
        assert matcher.advance([token])
        ids.append(token)
    assert matcher.is_complete
    return tokenizer.decode(ids, skip_special_tokens=False, at_start=False)


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_forced_calls_are_read_back_and_fit(tokenizer, form, key):
    for seed, most in ((0, 1), (1, 8), (2, 8)):
        text = walk(
            tokenizer, calls_grammar(spec_of(CALL_FORMATS[form], FUNCTIONS, key, max_calls=most), tokenizer), seed
        )
        content, calls = read(form, [text], {function.name: function.parameters for function in FUNCTIONS})
        assert content == ""
        assert 1 <= len(calls) <= most
        for name, arguments in calls:
            value = json.loads(arguments)
            assert value == {} if name == "stop" else (value["city"] in ("Oslo", "Paris") and 0 <= value["n"] <= 99)


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_call_after_allowed_text_is_valid(tokenizer, form):
    grammar = calls_grammar(spec_of(CALL_FORMATS[form], FUNCTIONS[:1], or_text=True), tokenizer)
    own = CALL_FORMATS[form]
    opening = own.syntax.openings[0] if own.writes_opening else ""
    begin = "<function=get" if own.syntax.in_xml else "get_weather(" if own.syntax.in_python else '{"name": "get'
    head = ("so " if opening else "") + opening + own.begin + own.before + begin
    content, calls = read(form, [walk(tokenizer, grammar, 4, head)], {"get_weather": STRICT})
    assert calls[0][0] == "get_weather"
    assert json.loads(calls[0][1])["city"] in ("Oslo", "Paris")
    assert content.startswith("so") == bool(opening)
    assert walk(tokenizer, grammar, 5, "hello").startswith("hello")


MALFORMED = [
    {"pattern": "x" * 5000},
    {"properties": {"a": {"pattern": "x" * 5000, "type": "object"}}},
    {"properties": []},
    {"required": [[1]]},
    {"required": "a"},
    {"properties": {"a": 1}},
    {"properties": {"a": {"type": [{}]}}},
    {"properties": {"a": {"anyOf": 1}}},
    {"properties": {"a": {"$ref": 1}}},
    {"properties": {"a": {"$ref": "#/b"}}},
    {"properties": {"a": {"enum": 1}}},
]


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("schema", MALFORMED)
def test_a_malformed_schema_is_refused_or_taken_for_any(tokenizer, form, schema):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    with contextlib.suppress(GrammarError):
        compiler.compile(calls_grammar(spec_of(CALL_FORMATS[form], [Function("f", schema)]), tokenizer))
    xml = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3_coder", [xml], {"f": schema})[1][0][0] == "f"


def test_a_schema_that_cannot_be_had_is_refused(tokenizer):
    with pytest.raises(GrammarError):
        calls_grammar(spec_of(HERMES, [Function("f", {"pattern": "x" * 5000})]), tokenizer)


FORMATS = (
    json_grammar(
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    ),
    regex_grammar("yes|no"),
    choice_grammar(["yes", "no"]),
    lark_grammar('start: function | call\nfunction: "yes"\ncall: "no"'),
)


@pytest.mark.parametrize("form", [name for name, form in CALL_FORMATS.items() if form.writes_opening])
@pytest.mark.parametrize("wanted", FORMATS)
def test_a_reply_calls_or_has_its_form(tokenizer, form, wanted):
    functions = [replace(function, is_strict=True) for function in FUNCTIONS]
    grammar = calls_grammar(spec_of(CALL_FORMATS[form], functions, or_text=True), tokenizer, wanted)
    answer = '{"a": 1}' if wanted is FORMATS[0] else "yes"
    assert walk(tokenizer, grammar, 4, answer) == answer
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1]).compile(grammar)
    assert not matcher.advance(tokenizer.encode("hello", False))
    own = CALL_FORMATS[form]
    head = own.syntax.openings[0] + own.begin + own.before
    begin = "<function=stop" if own.syntax.in_xml else '{"name": "stop'
    content, calls = read(form, [walk(tokenizer, grammar, 4, head + begin)])
    assert content == ""
    assert calls[0][0] == "stop"


STRICT_ONE = [Function("f", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                             "additionalProperties": False}, True)]  # fmt: skip
WRITTEN = {  # a call with a value, by form; where text may follow or not
    "granite": '<|tool_call|>[{{"name": "f", "arguments": {{"a": {}}}}}]',
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"a": {}}}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{{"name": "f", "arguments": {{"a": {}}}}}]',
    "phi4_mini_json": 'functools[{{"name": "f", "arguments": {{"a": {}}}}}]',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</seed:tool_call>",
    "llama3_json": '{{"name": "f", "arguments": {{"a": {}}}}}',
    "llama3_json_anywhere": '{{"name": "f", "arguments": {{"a": {}}}}}',
    "pythonic": "[f(a={})]",
    "pythonic_anywhere": "[f(a={})]",
}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens as a model writes them: markers by their own tokens, no blank before the first word."""
    ids: list[int] = []
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    for part in re.split(r"(</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)", text):
        special, rest = tokenizer.special_id(part), part.encode()
        if special is not None:
            ids.append(special)
            continue
        while rest:
            size = next(size for size in range(len(rest), 0, -1) if rest[:size] in by_bytes)
            ids.append(by_bytes[rest[:size]])
            rest = rest[size:]
    return ids


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_strict_call_is_enforced_wherever_text_is_allowed(tokenizer, form):
    grammar = calls_grammar(spec_of(CALL_FORMATS[form], STRICT_ONE, or_text=True), tokenizer)
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1]).compile(grammar)

    def passes(text: str) -> bool:
        copy = matcher.copy()
        return copy.advance(ids_of(tokenizer, text)) and copy.is_complete

    right, wrong = WRITTEN[form].format(1), WRITTEN[form].format(2)
    texts = [right, wrong]
    assert passes("Any text.")
    assert passes(right)
    assert not passes(wrong)
    if not CALL_FORMATS[form].syntax.at_start_only:
        between = "So: {} and\n{} so."
        assert passes(between.format(right, right))
        assert not passes(between.format(right, wrong))
        assert not passes(between.format(wrong, right))
    if form == "qwen3_coder":
        bare = [re.sub(r"</?tool_call>\n?", "", text).strip() for text in texts]
        assert passes(f"So:\n{bare[0]}\nand {bare[0]}\n{right}")
        assert not passes(f"So: {bare[1]}")
        assert not passes(f"{right}\n{bare[1]}")
        assert not passes(f"{bare[0]} <function=f> <parameter=a>2</parameter></function>")
    if form.startswith("pythonic"):
        assert not passes("<function_calls>\nf(a=2)\n</function_calls>")

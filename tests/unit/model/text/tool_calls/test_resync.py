"""Mixtures of valid calls, broken ones, unknown functions and prose: every valid call is found, the rest is text,
however the text is split, in linear time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text.tool_calls import stream as tool_call_stream
from model.text.tool_calls.formats import CALL_FORMATS
from model.text.tool_calls.reader import CallReader
from model.text.tool_calls.stream import MAX_RESCANS, ArgumentsDelta, CallStart, TextDelta, ToolCallStream
from tests.support.num_examples import num_examples

SCHEMAS = {"get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "stop": None}
Received = tuple[str, list[tuple[str, str]]]


def read(form: str, parts: Sequence[str], *, holds_calls: bool = False) -> Received:
    stream = ToolCallStream(CALL_FORMATS[form].syntax, SCHEMAS, holds_calls=holds_calls)
    content, calls = "", []
    for news in [one for part in parts for one in stream.push(part)] + stream.flush():
        match news:
            case TextDelta(text):
                content += text
            case CallStart(number, name):
                assert number == len(calls)
                calls.append([name, ""])
            case ArgumentsDelta(number, text):
                assert number == len(calls) - 1
                calls[-1][1] += text
    assert stream.num_calls == len(calls)
    return content, [tuple(call) for call in calls]


def is_whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def check(form: str, text: str, cuts: Sequence[int] = ()) -> Received:
    """Check the invariants of any text and return its events."""
    received = {}
    for holds in (False, True):
        received[holds] = read(form, [text], holds_calls=holds)
        bounds = [0, *sorted(cuts), len(text)]
        assert read(form, list(text), holds_calls=holds) == received[holds]
        parts = [text[i:j] for i, j in itertools.pairwise(bounds)]
        assert read(form, parts, holds_calls=holds) == received[holds]
    content, calls = received[True]
    assert all(name in SCHEMAS and is_whole(arguments) for name, arguments in calls)
    assert [call for call in received[False][1] if is_whole(call[1])] == calls  # what is streamed and whole is the same
    rest = iter(text)
    assert all(char in rest for char in content)
    if not calls:
        assert content == text
    return content, calls


def json_call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


OSLO, STOP = ("get_weather", '{"city": "Oslo", "days": 2}'), ("stop", "{}")
GOOD_JSON = [(json_call(*OSLO), OSLO), (json_call(*STOP, key="parameters"), STOP), ('{"name": "stop"}', STOP)]
BROKEN_JSON = [
    '{"name": "get_weather", "arguments": {"city": Oslo}}',
    '{"name": "get_weather", "arguments": {"city": "Oslo"}',
    '{"name": "get_weather", "arguments": {"city": "Os',
    '{"name": "get_weather", "arguments": {"city": "Oslo",, "days": 1}}',
    '{"name": "get_weather, "arguments": {}}',
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": "get_weather", "arguments": "Oslo"}',
    "{'name': 'stop', 'arguments': {}}",
    '{name: "stop"}',
    '{"name": "stop", "arguments": {"a": 01}}',
    '{"name": "stop", "arguments": {"a": nul}}',
    '{"arguments": {}}',
    '{"name": "stop", "arguments": {"a": "\\x"}}',
    "{}",
    "print(1)",
    "",
]
UNKNOWN_JSON = [json_call("rm", '{"path": "/"}'), json_call("rm", json_call(*STOP)), '{"name": 7}']


def wrapped(texts: Sequence[str]) -> list[str]:
    return [f"<tool_call>\n{text}\n</tool_call>" for text in texts]


def xml(name: str, body: str) -> str:
    return f"<function={name}>\n{body}</function>"


XML_OSLO = xml("get_weather", "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n")
XML_BROKEN = [
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
    "<tool_call>\n<function=get_weather>\n<parameter=ci",
    "<function=get_weather>\nOslo</function>",
    "<function=get_weather>\n<parameter=city>\nOs",
    "<tool_call>\nget_weather\n</tool_call>",
    "<function=",
    "<tool_call>\n<function=get_wea",
]
PYTHON_OSLO = "get_weather(city='Oslo', days=2)"
PIECES = {
    "hermes": (
        [(wrapped([text])[0], call) for text, call in GOOD_JSON],
        [*wrapped(BROKEN_JSON), *(f"<tool_call>{text}" for text in BROKEN_JSON)],
        wrapped(UNKNOWN_JSON),
    ),
    "qwen3_coder": (
        [(XML_OSLO, OSLO), *((one, OSLO) for one in wrapped([XML_OSLO])), (xml("stop", ""), STOP)],
        [*XML_BROKEN, "<tool_call>\n" + json_call(*STOP) + "\n</tool_call>"],
        [xml("rm", ""), *wrapped([xml("rm", "<parameter=a>\n1\n</parameter>\n")])],
    ),
}
PROSE = [
    "Hello there.",
    "a < b > c",
    "<tool",
    "</tool_call",
    "x = {1: [2]}",
    "<function",
    "so\n\nit is",
    "`[TOOL_CALL`",
]


@st.composite
def mixtures(draw):
    form = draw(st.sampled_from(sorted(PIECES)))
    good, broken, unknown = PIECES[form]
    kinds = {
        "good": st.sampled_from(good),
        **{k: st.sampled_from([(t, None) for t in v]) for k, v in (("bad", broken), ("rm", unknown), ("say", PROSE))},
    }
    return form, draw(st.lists(st.one_of(*kinds.values()), max_size=7)), draw(st.sampled_from(["\n", " ", "\n\n"]))


@settings(max_examples=num_examples(400), deadline=None, database=None)
@given(mixtures(), st.randoms(use_true_random=False))
def test_every_valid_call_is_found_and_the_rest_is_text(mixture, rng):
    form, parts, between = mixture
    text = between.join(part for part, _ in parts)
    content, calls = check(form, text, [rng.randrange(len(text) + 1) for _ in range(4)])
    assert calls == [call for _, call in parts if call is not None]
    rest = content
    for part, call in parts:
        if call is None:
            before, found, rest = rest.partition(part.strip())
            assert found == part.strip()
            assert not before.strip()
    assert not rest.strip()


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("llama3_json", f'{json_call("rm", "{}")}; {json_call(*STOP)}', json_call("rm", "{}") + ";", [STOP]),
        ("llama3_json", f'{BROKEN_JSON[0]}; {json_call(*STOP)}', BROKEN_JSON[0] + ";", [STOP]),
        ("llama3_json", f'{BROKEN_JSON[0]}\n{json_call(*STOP)}', BROKEN_JSON[0], [STOP]),
        ("llama3_json", f'{BROKEN_JSON[2]}; {json_call(*STOP)}', BROKEN_JSON[2] + ";", [STOP]),
        ("llama3_json", f'<|python_tag|>oops<|python_tag|>{json_call(*STOP)}', "<|python_tag|>oops", [STOP]),
        ("llama3_json", f'{{"a": {json_call(*STOP)}}}', None, []),
        ("llama3_json", f'{{"a": [{json_call(*STOP)}, {json_call(*OSLO)}]}}', None, []),
        ("llama3_json", f'{json_call("rm", json_call(*STOP))}', None, []),
        ("llama3_json", f"So: {json_call(*STOP)}", None, []),
        ("llama3_json_anywhere", f"Sure, let me check. {json_call(*OSLO)}", "Sure, let me check.", [OSLO]),
        ("llama3_json_anywhere", f"Of {{1}} and {{x}}: {json_call(*OSLO)} Done.", "Of {1} and {x}: Done.", [OSLO]),
        ("llama3_json_anywhere", f"Like {json_call('rm', json_call(*STOP))} no", None, []),
        ("llama3_json_anywhere", f"{BROKEN_JSON[2]} {json_call(*STOP)}", None, []),
        ("llama3_json_anywhere", f"{BROKEN_JSON[0]} {json_call(*STOP)}", BROKEN_JSON[0], [STOP]),
        ("mistral", f'[TOOL_CALLS][{json_call("rm", "{}")}, {json_call(*STOP)}]', None, [STOP]),
        ("mistral", "[TOOL_CALLS]rm{}[TOOL_CALLS]stop{}", "[TOOL_CALLS]rm{}", [STOP]),
        ("mistral", '[TOOL_CALLS]stop[CALL_ID]a1b2c3[ARGS]{"a": 1}', "", [("stop", '{"a": 1}')]),
        ("mistral", f"[TOOL_CALLS][{json_call(*STOP)}], and so on", ", and so on", [STOP]),
        ("pythonic", f"[rm(x=1), {PYTHON_OSLO}]", "[rm(x=1),", [OSLO]),
        ("pythonic", f"[stop(x=b'z'), {PYTHON_OSLO}]", "[stop(x=b'z')", [OSLO]),
        ("pythonic", f"[{PYTHON_OSLO}, stop(a='x 'y', b='z'), stop()]", ", stop(a='x 'y', b='z')", [OSLO, STOP]),
        ("pythonic", f"[stop(x=1e999), {PYTHON_OSLO}]", "[stop(x=1e999)", [OSLO]),
        ("pythonic", f"See [{PYTHON_OSLO}]", None, []),
        ("pythonic_anywhere", f"See [1, 2] and [a](b). [{PYTHON_OSLO}]", "See [1, 2] and [a](b).", [OSLO]),
        ("pythonic_anywhere", "The list is f(x), stop() and so on", None, []),
        ("hermes", "<tool_call>" * 3 + json_call(*STOP), "<tool_call>" * 2, [STOP]),
        ("hermes", f"<tool_call>{json_call(*STOP)}}}</tool_call> So", "}</tool_call> So", [STOP]),
        ("hermes", f"<tool_call>{json_call(*STOP)}\n{json_call(*OSLO)}</tool_call>", "", [STOP, OSLO]),
        ("hermes", f"<tool_call>{json_call('stop', json.dumps({'a': wrapped([json_call(*OSLO)])[0]}))}", "",
         [("stop", json.dumps({"a": wrapped([json_call(*OSLO)])[0]}))]),
    ],
)  # fmt: skip
def test_readings(form, text, content, calls):
    received = check(form, text, [len(text) // 2])
    assert received[1] == calls
    if content is not None:
        assert received[0] == content


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("hermes", '<tool_call>{"name": "stop"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": ""}</tool_call>'),
        ("llama3_json", '{"type": "function", "name": "stop"}'),
        ("mistral", '[TOOL_CALLS][{"name": "stop"}]'),
        ("qwen3_coder", "<function=stop></function>"),
        ("pythonic", "[stop()]"),
    ],
)
def test_a_call_without_arguments_has_an_empty_object(form, call):
    assert check(form, call) == ("", [STOP])


def test_line_breaks_in_strings_are_escaped():
    text = '<tool_call>{"name": "stop", "arguments": {"a\tb": "1\n2"}}</tool_call>'
    assert check("hermes", text) == ("", [("stop", '{"a\\tb": "1\\n2"}')])
    text = '<tool_call>{"name": "stop", "arguments": "{\\"a\\": \\"1\\n2\\"}"}</tool_call>'
    assert check("hermes", text) == ("", [("stop", '{"a": "1\\n2"}')])


def test_what_is_streamed_of_a_call_that_breaks_is_no_json():
    text = f"<tool_call>{BROKEN_JSON[1]}</tool_call>\n<tool_call>{json_call(*STOP)}</tool_call>"
    assert read("hermes", [text]) == ("</tool_call>", [("get_weather", '{"city": "Oslo"'), STOP])
    assert read("hermes", [text], holds_calls=True) == (f"<tool_call>{BROKEN_JSON[1]}</tool_call>", [STOP])


LONG = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "stop", "arguments": {"a": "', '<tool_call>{"a":"', "<", "\n"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]stop", '[TOOL_CALLS]stop{"a": "', "["],
    "llama3_json": ['{"a":', "{", '":{', '{"name": "stop", "parameters": {"a":', "}\n{", "<|python_tag|>"],
    "llama3_json_anywhere": ['{"a":', "{", '":{', "; {", '{"a": 1}'],
    "qwen3_coder": ["<function=stop>\n<parameter=a>\n", "<tool_call>", "<function=", "<function=rm>\n<parameter=a>"],
    "pythonic": ["[stop(", "[stop(a='", "[stop(a='[stop(a=\"", "),stop(", "[stop(a=((((", "[stop(a='''"],
    "pythonic_anywhere": ["[stop(", "[", "[stop(a='[stop(a=\"", ",stop(", "[rm(a='"],
}  # fmt: skip


@pytest.mark.parametrize(("form", "unit"), [(form, unit) for form, units in LONG.items() for unit in units])
@pytest.mark.parametrize("holds_calls", [False, True])
def test_any_long_text_is_read_in_linear_time(form, unit, holds_calls, monkeypatch):
    """Counts characters fed and copied instead of seconds."""
    num_fed, num_copied = 0, 0

    class CountingStream(ToolCallStream):
        def push(self, text):
            nonlocal num_copied
            num_copied += len(self._buffer)
            return super().push(text)

    def feed(self, char):
        nonlocal num_fed
        num_fed += 1
        self._state(char)

    monkeypatch.setattr(CallReader, "feed", feed)
    monkeypatch.setattr(tool_call_stream, "MAX_UNPROVEN_CHARS", 16 << 10)
    text, size = unit * (25_000 // len(unit)), 25_000 if holds_calls else 1000
    stream = CountingStream(CALL_FORMATS[form].syntax, SCHEMAS, holds_calls=holds_calls)
    for i in range(0, len(text), size):
        stream.push(text[i : i + size])
    stream.flush()
    assert num_fed <= (MAX_RESCANS + 2) * len(text)
    longest_held = tool_call_stream.MAX_UNPROVEN_CHARS + 2 * tool_call_stream.RESYNC_CHARS + 2 * size
    assert num_copied <= longest_held * (len(text) // size + 2)


def test_a_megabyte_of_openings_is_text():
    text = "<tool_call>" * 100_000
    assert read("hermes", [text], holds_calls=True) == (text, [])
    assert read("qwen3_coder", ["<function=stop>\n<parameter=a>\n" * 30_000], holds_calls=True)[1] == []

"""Grammars: the tokens they allow, refusals before compiling, and no crashes."""

from __future__ import annotations

import json
import random
import re
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from model.errors import GrammarError
from model.text import grammar
from model.text.grammar import COMPACT, choice_grammar, json_grammar, lark_grammar, regex_grammar
from model.text.grammar_compiler import MAX_GRAMMAR_BYTES
from model.text.grammar_matcher import MAX_CACHED_GRAMMARS, MAX_DIGITS, GrammarCompiler, Matcher
from model.text.tokenizer import Tokenizer
from tests.support.random_schemas import random_schema
from tests.support.schema_validator import is_valid

DEMO = Path(__file__).parents[4] / "model" / "demo"
EOS, BEGIN = 1, 0
VOCAB = 4101  # wider than the tokenizer: a few logits have no token
WORST_COMPILE_S = 8.0  # of the processor, on a slow machine


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(DEMO)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, [EOS])


def allowed(matcher: Matcher, ends=(EOS,)) -> list[int]:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    assert matcher.fill_mask(words, ends)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def walk(compiler, tokenizer, text: str, seed: int = 0, max_tokens: int = 4000) -> str:
    """Return a random complete text of the grammar."""
    matcher, rng, ids = compiler.compile(text), random.Random(seed), []
    for _ in range(max_tokens):
        if matcher.is_finished:
            break
        token = rng.choice(allowed(matcher))
        if token == EOS:
            assert matcher.is_complete
            break
        assert matcher.advance([token])
        ids.append(token)
    else:
        raise AssertionError("no end")
    assert matcher.is_complete
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_drawn_fits_the_schema(compiler, tokenizer, seed):
    schema = random_schema(random.Random(seed))
    for whitespace in (grammar.WHITESPACE, COMPACT):
        value = json.loads(walk(compiler, tokenizer, json_grammar(schema, whitespace=whitespace), seed))
        assert is_valid(value, schema), (schema, value)


@pytest.mark.parametrize(
    "pattern", [r"^\d{2}-[a-c]+$", r"a/b\n[/]", r"(?i)yes|no", r"cost: \$\d\$", r"[^\x00-\x7f]{2}"]
)
def test_regular_expressions_match_as_a_whole(compiler, tokenizer, pattern):
    for seed in range(10):
        assert re.fullmatch(pattern, walk(compiler, tokenizer, regex_grammar(pattern), seed))


def test_choices_and_grammars(compiler, tokenizer):
    choices = ["the cat", 'a "quoted"\nline', "<|end|>", "猫😀"]
    assert {walk(compiler, tokenizer, choice_grammar(choices), seed) for seed in range(60)} == set(choices)
    lark = 'start: "sum " NUMBER (" + " NUMBER)?\nNUMBER: /[1-9][0-9]?/'
    gbnf = 'root ::= "sum " number (" + " number)?\nnumber ::= [1-9] [0-9]?'
    for text in (lark, gbnf):
        for seed in range(10):
            assert re.fullmatch(r"sum [1-9]\d?( \+ [1-9]\d?)?", walk(compiler, tokenizer, lark_grammar(text), seed))


def test_text_never_lets_a_control_token_through(compiler):
    for text in (regex_grammar(r"(?s:.*)"), choice_grammar(["<|end|>", "<|user|>x"]), json_grammar(True)):
        found = allowed(compiler.compile(text), ends=())
        assert not {0, 1, 2, 3, 4} & set(found)
        assert max(found) < 4096


def test_the_end_is_allowed_where_the_text_is_complete(compiler, tokenizer):
    matcher = compiler.compile(regex_grammar("ab?"))
    assert EOS not in allowed(matcher)
    matcher.advance(tokenizer.encode("a")[-1:])
    assert {EOS, 7, 8} <= set(allowed(matcher, ends=(EOS, 7, 8)))
    assert EOS not in allowed(matcher, ends=())
    assert not matcher.is_finished
    matcher.advance(tokenizer.encode("b")[-1:])
    assert matcher.is_finished
    assert allowed(matcher) == [EOS]


def test_numbers_come_to_an_end(compiler, tokenizer):
    by_char = {tokenizer.token_bytes(token).decode("latin-1"): token for token in range(256 + 5)}
    for text, begin in ((json_grammar({"type": "number"}), "0."), (json_grammar({"type": "integer"}), "1")):
        matcher = compiler.compile(text)
        assert matcher.advance([by_char[char] for char in begin])
        for _ in range(MAX_DIGITS - begin.isdigit()):
            assert by_char["7"] in allowed(matcher)
            assert matcher.advance([by_char["7"]])
        assert EOS in allowed(matcher)
        assert not any(tokenizer.token_bytes(token)[:1].isdigit() for token in allowed(matcher))
        assert not any(tokenizer.token_bytes(token)[:1].isdigit() for token in allowed(matcher.copy()))
    must = compiler.compile(json_grammar({"type": "string", "pattern": "^[0-9]{50}$"}))
    assert must.advance([by_char['"'], *[by_char["7"]] * 50])  # where nothing else may follow
    free = compiler.compile(regex_grammar("[0-9]*"))
    assert free.advance([by_char["7"]] * 50)
    assert by_char["7"] in allowed(free)


def test_a_copy_goes_its_own_way_and_a_replay_comes_to_the_same_place(compiler, tokenizer):
    text = json_grammar(random_schema(random.Random(3)))
    matcher, rng, ids = compiler.compile(text), random.Random(1), []
    for _ in range(8):
        token = rng.choice([token for token in allowed(matcher) if token != EOS])
        matcher.advance([token])
        ids.append(token)
    here, copy, replayed = allowed(matcher), matcher.copy(), compiler.compile(text)
    assert replayed.advance(ids)
    assert allowed(replayed) == here
    copy.advance(here[:1])
    assert allowed(matcher) == here
    assert not compiler.compile(text).advance([BEGIN])


def test_a_token_that_does_not_fit_fails_the_matcher(compiler):
    matcher = compiler.compile(choice_grammar(["yes"]))
    assert not matcher.advance([BEGIN])
    assert matcher.has_failed
    assert not matcher.fill_mask(np.zeros(-(-VOCAB // 32), np.uint32), ())


@pytest.mark.parametrize("text", ['start: <|end|> "x"', "start: <[1]>"])
def test_a_grammar_that_only_eos_would_fit_fails(compiler, text):
    matcher, words = compiler.compile(lark_grammar(text)), np.zeros(-(-VOCAB // 32), np.uint32)
    assert not matcher.has_failed
    assert not matcher.fill_mask(words, (EOS,))
    assert matcher.has_failed
    assert np.all(words == 0xFFFFFFFF)
    assert not matcher.advance([EOS])


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_grammar("text"),
        lambda: json_grammar({"type": "objct"}),
        lambda: json_grammar({"$ref": "#/nowhere"}),
        lambda: json_grammar({"$ref": "https://example.com/schema"}),
        lambda: json_grammar({"type": "string", "format": "no such"}),
        lambda: json_grammar({"not": {}}),
        lambda: json_grammar({"x": float("nan")}),
        lambda: json_grammar({}, whitespace="x" * 100),
        lambda: regex_grammar(""),
        lambda: regex_grammar("(a"),
        lambda: regex_grammar(r"\bword"),
        lambda: regex_grammar("a" * 5000),
        lambda: choice_grammar([]),
        lambda: choice_grammar(["a", ""]),
        lambda: choice_grammar(["a"] * 2000),
        lambda: lark_grammar("no grammar"),
        lambda: lark_grammar("start: missing"),
        lambda: lark_grammar('%llguidance {"no_forcing": false}\nstart: "a"'),
        lambda: "start: " + '"a" ' * MAX_GRAMMAR_BYTES,
    ],
)
def test_what_cannot_be_had_is_refused(compiler, make):
    with pytest.raises(GrammarError) as caught:
        compiler.compile(make())
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_lenient_passes_over_what_none_knows(compiler, tokenizer):
    schema = {"oneOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"const": 3}], "format": "no such"}
    assert json.loads(walk(compiler, tokenizer, json_grammar(schema, lenient=True))) in range(10)


def chain(count: int, link) -> dict:
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "boolean"}}}


def nested(count: int) -> dict:
    schema: dict = {"type": "boolean"}
    for i in range(count):
        schema = {"anyOf": [schema, {"const": i}]}
    return schema


def lark_chain(count: int, name: str, body: str) -> str:
    """Return rules or terminals in a chain; N in `body` is the next one."""
    names = [f"{name}{i}" for i in range(count + 1)]
    rules = [f"{one}: {body.replace('N', following)}" for one, following in pairwise(names)]
    return lark_grammar("\n".join([f"start: {names[0]}", *rules, f'{names[-1]}: "z"']))


def properties(count: int, **schema) -> str:
    return json_grammar({"type": "object", "properties": {f"p{i}": schema for i in range(count)}})


HOSTILE = {
    "rules in a chain": lambda n: lark_chain(n, "r", 'N | "x"'),
    "terminals in a chain": lambda n: lark_chain(n, "R", "N N"),
    "rules of parentheses": lambda n: lark_chain(n // 20, "r", "(" * 20 + "N" + ")" * 20),
    "parentheses": lambda n: lark_grammar("start: " + "(" * n + '"a"' + ")" * n),
    "references": lambda n: json_grammar(chain(n, lambda ref: {"anyOf": [ref, {"const": 1}]})),
    "references to arrays": lambda n: json_grammar(chain(n, lambda ref: {"type": "array", "items": ref})),
    "references twice": lambda n: json_grammar(chain(n, lambda ref: {"allOf": [ref, ref]})),
    "anyOf in anyOf": lambda n: json_grammar(nested(n)),
    "itself": lambda n: json_grammar({"allOf": [{"$ref": "#"}], "x": n}),
    "regex of groups": lambda n: regex_grammar("(" * n + "a" + ")" * n),
    "regex of repeats": lambda n: regex_grammar("a?" * n),
    "regex of classes": lambda n: regex_grammar("".join(f"[a-{chr(98 + i % 20)}]*" for i in range(n))),
    "patterns": lambda n: properties(n, type="string", pattern="(.*a.{9}){9}"),
    "products": lambda n: regex_grammar(f"(([a-z]{{1,{n}}}x){{1,{n}}}y){{1,{n}}}"),
    "properties": lambda n: properties(n, type="string"),
    "values": lambda n: json_grammar({"enum": [f"v{i}" for i in range(n)]}),
    "many multiples": lambda n: properties(n, type="integer", multipleOf=9973),
    "decimal multiples": lambda n: json_grammar({"type": "number", "multipleOf": 1 / n}),
    "common multiples": lambda n: json_grammar({"allOf": [{"type": "number", "multipleOf": n + i} for i in range(3)]}),
    "multiples": lambda n: json_grammar({"type": "integer", "multipleOf": n * 1009 + 2}),
}


@pytest.mark.parametrize("size", [40, 110, 200, 390, 1200, 20_000])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_compiled_in_time(compiler, name, size):
    start_s = time.process_time()
    try:
        matcher = compiler.compile(HOSTILE[name](size))
        matcher.fill_mask(np.zeros(-(-VOCAB // 32), np.uint32), (EOS,))
    except GrammarError:
        pass
    assert time.process_time() - start_s < WORST_COMPILE_S


UNRESOLVABLE = {"anyOf": [{"$ref": f"#/$defs/no{i}"} for i in range(1900)]}
NESTED_TARGETS = {
    "$defs": {"a": json.loads('{"items":' * 100 + '{"enum":[' + "1," * 8000 + "1]}" + "}" * 100)},
    "anyOf": [{"$ref": "#/$defs/a" + "/items" * i} for i in range(100)],
}


@pytest.mark.parametrize("schema", [UNRESOLVABLE, NESTED_TARGETS], ids=["of nothing", "of parts of one part"])
def test_references_are_followed_in_time_linear_in_the_schema(schema):
    start_s = time.thread_time()
    with pytest.raises(GrammarError, match=r"points to nothing|too complex"):
        json_grammar(schema)
    assert time.thread_time() - start_s < 3  # coverage makes it three times as slow


def test_references_may_follow_each_other_but_not_around_in_a_long_circle(compiler):
    compiler.compile(json_grammar(chain(2000, lambda ref: {"type": "array", "items": ref})))
    around = {f"d{i}": {"items": {"$ref": f"#/$defs/d{(i + 1) % 300}"}} for i in range(300)}
    with pytest.raises(GrammarError, match="references included"):
        json_grammar({"$ref": "#/$defs/d0", "$defs": around})


def test_references_count_once_for_each_target():
    same = {"type": "array", "items": {"type": "array", "items": {"type": "null"}}}
    json_grammar({"$defs": {"a": same}, "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(500)}})


def test_huge_multiples_are_refused():
    for value in (10**4000, 1e308, 1e-300):
        with pytest.raises(GrammarError):
            json_grammar({"multipleOf": value})


def test_the_cache_holds_few_grammars(compiler):
    first = regex_grammar("x{1}")
    compiler.compile(first)
    for i in range(MAX_CACHED_GRAMMARS + 5):
        compiler.compile(regex_grammar(f"y{{{i + 1}}}"))
    assert len(compiler._cache) == MAX_CACHED_GRAMMARS
    assert first not in compiler._cache


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (regex_grammar("(?=a)b"), "line 1: regular expression: look-around, including look-ahead and look-behind,"),
        (json_grammar({"pattern": f"{'a' * 999}(b)\\1"}), "line 1: regular expression: backreferences are not supp"),
        (lark_grammar('start: "x" a\na: /[/'), "line 2: regular expression: unclosed character class"),
        (lark_grammar("start: other"), 'line 1: unknown name: "other"'),
    ],
)
def test_a_refusal_names_what_is_wrong_and_the_clients_line(compiler, text, reason):
    with pytest.raises(GrammarError, match=re.escape(f"The grammar cannot be compiled: {reason}")):
        compiler.compile(text)

"""The amount of prose, its words, and docstrings that begin with a verb or a noun."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.source_tree import Source, sources

MAX_WORDS_PER_1000_LINES = 900
PRONOUNS = re.compile(r"\b(whoever|somebody|nobody|everybody)\b", re.IGNORECASE)
DIALECT = re.compile(r"\b(tells?|told|telling|stands)\b", re.IGNORECASE)
HEADLESS = re.compile(
    r"(Of|As|For|By|Where|When|In|With|From|To|At|On|Whether|What|Who|How|Which|Those|That|Once|Until|So|Beside|Behind)\b"
)
"""First words of a docstring whose subject is missing."""


def docstrings(module: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included."""
    for node in module.nodes:
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else []:
            match line:
                case ast.Expr(ast.Constant(str(text))):
                    yield line.lineno, text


def comments(module: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


@cache
def prose(module: Source) -> list[tuple[int, str]]:
    return [*docstrings(module), *comments(module)]


def words_per_1000_lines(modules: list[Source]) -> float:
    words = sum(len(text.split()) for module in modules for _, text in prose(module))
    return 1000 * words / sum(len(module.text.splitlines()) for module in modules)


def uses(pattern: re.Pattern[str], modules: list[Source]) -> list[str]:
    """Every use of the words in prose."""
    return [
        f"{module.name}:{line}: {match[0]}"
        for module in modules
        for line, text in prose(module)
        for match in pattern.finditer(text)
    ]


def headless(modules: list[Source]) -> list[str]:
    """Docstrings that begin without a verb or a noun."""
    return [
        f"{module.name}:{line}: {text.strip().splitlines()[0][:60]}"
        for module in modules
        for line, text in docstrings(module)
        if HEADLESS.match(text.strip())
    ]


@pytest.fixture(scope="module")
def modules() -> list[Source]:
    return [module for module in sources("service", "model") if not module.name.startswith("model.demo.")]


@pytest.fixture(scope="module")
def helpers() -> list[Source]:
    return list(sources("tests/support", "tests/fakes"))


def test_prose_is_short(modules):
    assert words_per_1000_lines(modules) < MAX_WORDS_PER_1000_LINES


@pytest.mark.parametrize("pattern", [PRONOUNS, DIALECT], ids=["pronouns", "dialect"])
def test_words_are_plain(modules, helpers, pattern):
    words = sum(len(text.split()) for module in modules for _, text in prose(module))
    found = uses(pattern, [*modules, *helpers])
    assert len(found) < words / 10_000, found


def test_docstrings_have_a_subject(modules, helpers):
    assert headless([*modules, *helpers]) == []


def test_the_rules_can_fail():
    module = Source.of("x", '"""Of one engine."""\n\nX = 1\n"""Told by whoever asks."""  # nobody stands here\n')
    assert words_per_1000_lines([module]) == 10 / 4 * 1000
    assert uses(PRONOUNS, [module]) == ["x:4: whoever", "x:4: nobody"]
    assert uses(DIALECT, [module]) == ["x:4: Told", "x:4: stands"]
    assert headless([module]) == ["x:1: Of one engine."]

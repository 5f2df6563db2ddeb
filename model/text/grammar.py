"""Structured-output grammars in llguidance's Lark dialect, with bounded inputs.

llguidance recurses as deep as a grammar nests and takes quadratic time in a regular expression's length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from model.errors import GrammarError
from model.text.json_schema.compile import enforceable
from model.text.json_schema.limits import MAX_REGEX_CHARS, check_intersections, check_schema

MAX_CHOICES_BYTES = 64 << 10
MAX_LARK_BYTES = 16 << 10
MAX_LARK_DEPTH = 400
"""Max rules plus opening brackets, which bound the nesting."""
MAX_CHOICES = 1024
MAX_WHITESPACE_CHARS = 64

WHITESPACE = r"( |\n {0,24})"
"""One blank or indented line break between JSON tokens; unbounded whitespace might never end."""
COMPACT = ""

ESCAPES = 'nrbtf\\"'
r"""Allowed JSON escapes; \uXXXX could respell a declared property to evade its schema."""

CONVERTED = "%llguidance {}\n"

HEADER = '%llguidance {"no_forcing": true}\n'
"""Samples even forced text, so that the model chooses its tokens."""


def json_grammar(schema: Any, *, whitespace: str = WHITESPACE, lenient: bool = False) -> str:
    """Return the grammar of JSON that matches `schema`; `lenient` ignores unknown formats. Raises GrammarError."""
    return f"{HEADER}start: {json_rule(schema, whitespace=whitespace, lenient=lenient)}"


def json_rule(schema: Any, *, whitespace: str = WHITESPACE, lenient: bool = False) -> str:
    """Return `json_grammar` as a Lark expression. Raises GrammarError."""
    check_schema(schema)
    return enforced_rule(enforceable(schema, lenient=lenient), whitespace)


def enforced_rule(schema: Mapping[str, Any], whitespace: str) -> str:
    """Return the Lark expression of a rewritten schema. Raises GrammarError."""
    check_intersections(schema)
    options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
    if whitespace == COMPACT:
        options["whitespace_flexible"] = False
    else:
        _check_regex(whitespace, MAX_WHITESPACE_CHARS, "whitespace")
        options["whitespace_pattern"] = whitespace
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that fully match `pattern`. Raises GrammarError."""
    _check_regex(pattern, MAX_REGEX_CHARS, "regular expression")
    return f"{HEADER}start: {_regex_rule(pattern)}"


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of `choices`. Raises GrammarError."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise GrammarError(f"There must be 1 to {MAX_CHOICES} choices, none of them empty.")
    text = f"{HEADER}start: CHOICE\nCHOICE: {' | '.join(map(literal, choices))}"
    if len(text.encode("utf-8", "replace")) > MAX_CHOICES_BYTES:
        raise GrammarError(f"The choices take more than {MAX_CHOICES_BYTES} bytes.")
    return text


def lark_grammar(text: str) -> str:
    """Convert a grammar in llguidance's Lark or llama.cpp's GBNF. Raises GrammarError."""
    _check_lark(text)
    try:
        lark = any_to_lark(text).removeprefix(CONVERTED)
    except Exception as error:  # the converter raises any parser error
        raise GrammarError("The grammar is neither Lark nor GBNF.") from error
    _check_lark(lark)
    return HEADER + lark


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex_rule(pattern: str) -> str:
    anchored = pattern.removeprefix("^")
    if anchored.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$\Z", anchored):
        anchored = anchored[:-1]
    if not anchored:
        raise GrammarError("The regular expression allows only the empty text.")
    return f"/{regex_to_lark(anchored, '')}/"


def _check_regex(pattern: str, max_chars: int, name: str) -> None:
    if not 0 < len(pattern) <= max_chars:
        raise GrammarError(f"The {name} must have 1 to {max_chars} characters.")


def _check_lark(text: str) -> None:
    if "%llguidance" in text:
        raise GrammarError("The grammar may not set options with %llguidance.")
    if len(text.encode("utf-8", "replace")) > MAX_LARK_BYTES:
        raise GrammarError(f"The grammar takes more than {MAX_LARK_BYTES} bytes.")
    num_rules = len(re.findall(r":(?!=)|::=", text))
    if num_rules + sum(text.count(bracket) for bracket in "([{") > MAX_LARK_DEPTH:
        raise GrammarError(f"The grammar has more than {MAX_LARK_DEPTH} rules and brackets.")

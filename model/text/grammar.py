"""Grammars of structured output in llguidance's Lark, with every input bounded.

llguidance recurses as deep as a grammar nests, with rules and references followed, and its time grows with the square
of a regular expression's length. Both are bounded here, before it sees a client's grammar.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from model.errors import GrammarError
from model.text.json_schema.compile import enforceable
from model.text.schema_bounds import MAX_MEETING_PATTERNS, MAX_PATTERN_KEYS, meeting_patterns

MAX_SCHEMA_BYTES = 1 << 20
"""The cost of a schema is bounded by the rewriter (nodes, depth) and the compiling process (time, memory)."""
MAX_SCHEMA_DEPTH = 128
"""Nested lists and maps."""
MAX_CHOICES_BYTES = 64 << 10
MAX_LARK_BYTES = 16 << 10
MAX_LARK_DEPTH = 400
"""Rules, opening brackets and parentheses together: bounds how deep any of them nest."""
MAX_REGEX_CHARS = 4096
MAX_PATTERN_CHARS = 16 << 10
"""All regular expressions of one schema."""
MAX_MULTIPLE = 100_000
"""Least common multiple, and sum, of the numbers in `multipleOf`: an automaton has a state for each remainder."""
MAX_PLACES = 5
MAX_CHOICES = 1024
MAX_WHITESPACE_CHARS = 64

WHITESPACE = r"( |\n {0,24})"
"""Between JSON tokens: at most one blank, or a line break with its indent. More could go on for ever."""
COMPACT = ""
"""`whitespace` that allows none."""

ESCAPES = 'nrbtf\\"'
r"""Allowed after a backslash in JSON. No \uXXXX: with it the model could respell a declared property and so be held to
the schema of undeclared ones. Other control characters cannot be generated."""

CONVERTED = "%llguidance {}\n"
"""First line of the GBNF converter's output."""

HEADER = '%llguidance {"no_forcing": true}\n'
"""Forced text is sampled like any other, in the tokens that the model prefers."""


def of_json(schema: Any, *, whitespace: str = WHITESPACE, lenient: bool = False) -> str:
    """Return the grammar of JSON that matches `schema` (a JSON value; true: any JSON).

    `lenient` ignores unknown keywords. Raises GrammarError.
    """
    return f"{HEADER}start: {json_rule(schema, whitespace=whitespace, lenient=lenient)}"


def json_rule(schema: Any, *, whitespace: str = WHITESPACE, lenient: bool = False) -> str:
    """Return `of_json` as an expression for use in a rule. Raises GrammarError."""
    check_schema(schema)
    return enforced_rule(enforceable(schema, lenient=lenient), whitespace)


def enforced_rule(schema: Mapping[str, Any], whitespace: str) -> str:
    """Return the rule of a schema that `model.text.json_schema` has rewritten. Raises GrammarError."""
    _check_meeting(schema)
    options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
    if whitespace == COMPACT:
        options["whitespace_flexible"] = False
    else:
        _check_regex(whitespace, MAX_WHITESPACE_CHARS, "whitespace")
        options["whitespace_pattern"] = whitespace
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def of_regex(pattern: str) -> str:
    """Return the grammar of text that `pattern` matches as a whole. Raises GrammarError."""
    _check_regex(pattern, MAX_REGEX_CHARS, "regular expression")
    return f"{HEADER}start: {_regex_rule(pattern)}"


def of_choice(choices: Sequence[str]) -> str:
    """Return the grammar of exactly one of `choices`. Raises GrammarError."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise GrammarError(f"There must be 1 to {MAX_CHOICES} choices, none of them empty.")
    text = f"{HEADER}start: CHOICE\nCHOICE: {' | '.join(map(literal, choices))}"
    if len(text.encode("utf-8", "replace")) > MAX_CHOICES_BYTES:
        raise GrammarError(f"The choices take more than {MAX_CHOICES_BYTES} bytes.")
    return text


def of_grammar(text: str) -> str:
    """Return a grammar given in llguidance's Lark or llama.cpp's GBNF. Raises GrammarError."""
    _check_lark(text)
    try:
        lark = any_to_lark(text).removeprefix(CONVERTED)
    except Exception as error:  # the converter raises any error of its parser
        raise GrammarError("The grammar is neither Lark nor GBNF.") from error
    _check_lark(lark)
    return HEADER + lark


def literal(text: str) -> str:
    """Return `text` as a Lark literal."""
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


def check_schema(schema: Any) -> None:
    """Check the size of a schema. Raises GrammarError if it is too large."""
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("A JSON schema must be an object.")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise GrammarError("The JSON schema holds what JSON cannot.") from None
    if len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise GrammarError(f"The JSON schema takes more than {MAX_SCHEMA_BYTES} bytes.")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise GrammarError(f"The JSON schema nests more than {MAX_SCHEMA_DEPTH} deep.")
    _check_multiples([value for name, value in _members(schema) if name == "multipleOf"])
    patterns = [value for name, value in _members(schema) if name == "pattern" and isinstance(value, str)]
    patterns += [key for name, value in _members(schema) if name == "patternProperties" for key in _names(value)]
    if max(map(len, patterns), default=0) > MAX_REGEX_CHARS or sum(map(len, patterns)) > MAX_PATTERN_CHARS:
        raise GrammarError(f"The JSON schema's patterns exceed {MAX_REGEX_CHARS} characters, or {MAX_PATTERN_CHARS}.")


def _check_meeting(schema: Mapping[str, Any]) -> None:
    num_patterns, num_keys = meeting_patterns(schema)
    if num_patterns > MAX_MEETING_PATTERNS:
        raise GrammarError(f"One text must match more than {MAX_MEETING_PATTERNS} of the JSON schema's patterns.")
    if num_keys > MAX_PATTERN_KEYS:
        raise GrammarError(f"One object of the JSON schema has more than {MAX_PATTERN_KEYS} 'patternProperties'.")


def _check_multiples(values: Sequence[Any]) -> None:
    """Bound the decimals scaled to integers together, as llguidance does where they meet in one number."""
    numbers = [
        value for value in values if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]
    if max(numbers, default=0) > MAX_MULTIPLE:
        raise GrammarError(f"The JSON schema's 'multipleOf' come to more than {MAX_MULTIPLE}.")
    decimals = [Decimal(str(number)) for number in numbers]
    places = max((-decimal.as_tuple().exponent for decimal in decimals), default=0)
    if places > MAX_PLACES:
        raise GrammarError(f"The JSON schema's 'multipleOf' may have {MAX_PLACES} decimal places.")
    common, total = 1, 0
    for decimal in decimals:
        scaled = int(decimal.scaleb(max(0, places)))
        common, total = math.lcm(common, scaled), total + scaled
        if common > MAX_MULTIPLE or total > MAX_MULTIPLE:
            raise GrammarError(f"The JSON schema's 'multipleOf' come to more than {MAX_MULTIPLE}.")


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every name and value of every nested map."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            yield from item.items()
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, Mapping | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, Mapping) else item)]
    return depth

"""What a structured answer may look like, written as one text in llguidance's Lark, with bounds on everything in it.

A grammar of a stranger is compiled by code that recurses as deep as the grammar nests, rules and references followed,
and whose time grows with the square of a regular expression's length. So both are bounded here, before it sees any.
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
"""What a schema costs is bounded where it is rewritten (nodes, depth) and where it is compiled (time, memory)."""
MAX_SCHEMA_DEPTH = 128
"""Lists and maps inside each other."""
MAX_CHOICES_BYTES = 64 << 10
MAX_LARK_BYTES = 16 << 10
MAX_LARK_DEPTH = 400
"""Rules, opening brackets and parentheses together: a bound on how deep any of them can nest."""
MAX_REGEX_CHARS = 4096
MAX_PATTERN_CHARS = 16 << 10
"""Of all regular expressions of one schema."""
MAX_MULTIPLE = 100_000
"""Least common multiple, and sum, of the numbers in `multipleOf`: an automaton has a state for each remainder."""
MAX_PLACES = 5
MAX_CHOICES = 1024
MAX_WHITESPACE_CHARS = 64

WHITESPACE = r"( |\n {0,24})"
"""Between the tokens of JSON at most: one blank, or a new line with its indent. Any more could go on for ever."""
COMPACT = ""
"""The `whitespace` that allows none."""

ESCAPES = 'nrbtf\\"'
r"""After a backslash. Without \uXXXX: a property could be spelled with it that a schema speaks of, and then be held to
what the schema says of the others. No other control characters can be generated."""

CONVERTED = "%llguidance {}\n"
"""Begins what the converter of GBNF writes."""

HEADER = '%llguidance {"no_forcing": true}\n'
"""Text that must come is sampled as any other, in whichever tokens the model likes."""


def of_json(schema: Any, *, whitespace: str = WHITESPACE, lenient: bool = False) -> str:
    """JSON that a schema (the JSON value, or true for any) allows; `lenient` passes over keywords that nobody knows.

    Raises GrammarError.
    """
    return f"{HEADER}start: {json_rule(schema, whitespace=whitespace, lenient=lenient)}"


def json_rule(schema: Any, *, whitespace: str = WHITESPACE, lenient: bool = False) -> str:
    """The same as an expression that may stand in a rule. Raises GrammarError."""
    check_schema(schema)
    return enforced_rule(enforceable(schema, lenient=lenient), whitespace)


def enforced_rule(schema: Mapping[str, Any], whitespace: str) -> str:
    """The same of a schema that `model.text.json_schema` has made. Raises GrammarError."""
    _check_meeting(schema)
    options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
    if whitespace == COMPACT:
        options["whitespace_flexible"] = False
    else:
        _check_regex(whitespace, MAX_WHITESPACE_CHARS, "whitespace")
        options["whitespace_pattern"] = whitespace
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def of_regex(pattern: str) -> str:
    """Text that the whole of a regular expression matches. Raises GrammarError."""
    _check_regex(pattern, MAX_REGEX_CHARS, "regular expression")
    return f"{HEADER}start: {_regex_rule(pattern)}"


def of_choice(choices: Sequence[str]) -> str:
    """One of some texts. Raises GrammarError."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise GrammarError(f"There must be 1 to {MAX_CHOICES} choices, none of them empty.")
    text = f"{HEADER}start: CHOICE\nCHOICE: {' | '.join(map(literal, choices))}"
    if len(text.encode("utf-8", "replace")) > MAX_CHOICES_BYTES:
        raise GrammarError(f"The choices take more than {MAX_CHOICES_BYTES} bytes.")
    return text


def of_grammar(text: str) -> str:
    """What a grammar describes that is written in llguidance's Lark, or in llama.cpp's GBNF. Raises GrammarError."""
    _check_lark(text)
    try:
        lark = any_to_lark(text).removeprefix(CONVERTED)
    except Exception as error:  # the converter raises whatever its reading stumbles over
        raise GrammarError("The grammar is neither Lark nor GBNF.") from error
    _check_lark(lark)
    return HEADER + lark


def literal(text: str) -> str:
    """A text as an expression of Lark."""
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
    """Decimals are scaled to integers together, as they are where two of them meet in one number."""
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
    """Every name of every map inside, with its value."""
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

"""Asks llguidance, which enforces them, whether two assertions share a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model.text.json_schema.core import other_texts

KEYWORDS = ("pattern", "format", "enum", "minLength", "maxLength", "notEnum")
MAX_CHARS = 2048
"""Max length of one query."""
MAX_ANSWERS = 1024
UNSATISFIABLE = "Unsatisfiable schema"


def must_be_asked(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether both constrain text, at least one by `pattern` or `format`."""
    both_bound = all(any(key in core for key in KEYWORDS) for core in (one, other))
    return both_bound and any(key in core for core in (one, other) for key in ("pattern", "format"))


def no_text_fits(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    question = json.dumps({"allOf": [*_of_texts(one), *_of_texts(other)]})
    return len(question) <= MAX_CHARS and _is_unsatisfiable(question)


def matches(pattern: str, text: str) -> bool | None:
    """Return whether the pattern matches somewhere in the text; None if unknown."""
    question = json.dumps({"allOf": [{"type": "string", "enum": [text]}, {"type": "string", "pattern": pattern}]})
    return None if len(question) > MAX_CHARS else not _is_unsatisfiable(question)


def _of_texts(core: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = {"type": "string", **{key: core[key] for key in KEYWORDS if key in core and key != "notEnum"}}
    return [own, {"type": "string", "pattern": other_texts(core["notEnum"])}] if "notEnum" in core else [own]


@lru_cache(MAX_ANSWERS)
def _is_unsatisfiable(question: str) -> bool:
    matcher = LLMatcher(_tokenizer(), f"start: %json {question}", log_level=0)
    return matcher.is_error() and UNSATISFIABLE in matcher.get_error()


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")

"""Module name patterns of quantisation configs."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from model.config_fields import Fields

Matches = Callable[[str], bool]

MAX_ENTRIES = 20_000
MAX_ENTRY_LENGTH = 500
MAX_OVERRIDES = 1000
MAX_REPEATS = 4
"""Matching takes at most len(name) ** MAX_REPEATS steps, as no group may repeat."""

_ESCAPED = re.compile(r"\\.|\[[^\]]*\]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_REPEAT = re.compile(r"[*+{]")


def entries(fields: Fields, name: str) -> list[str]:
    """Return a list of strings, [] if missing. Raises ModelError."""
    value: Any = fields.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise fields.error(name, "is not a list of strings")
    if len(value) > MAX_ENTRIES or any(len(entry) > MAX_ENTRY_LENGTH for entry in value):
        raise fields.error(name, f"is too long (at most {MAX_ENTRIES} entries of {MAX_ENTRY_LENGTH} characters)")
    return value


def compile_regex(fields: Fields, name: str, pattern: str) -> re.Pattern[str]:
    """Compile a pattern that cannot take exponential time. Raises ModelError."""
    plain = _ESCAPED.sub("x", pattern)
    if _REPEATED_GROUP.search(plain) or len(_REPEAT.findall(plain)) > MAX_REPEATS:
        raise fields.error(name, f"{pattern!r} repeats a group, or repeats more than {MAX_REPEATS} times")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise fields.error(name, f"{pattern!r} is not a regular expression") from None


def dynamic_overrides(fields: Fields) -> list[tuple[Callable[[str], Any], Fields | None]]:
    """Read GPTQModel's `dynamic` as (name matcher, changed fields); None, from the prefix "-:": not quantised."""
    section = fields.section("dynamic")
    if section is None:
        return []
    if len(section.raw) > MAX_OVERRIDES:
        raise fields.error("dynamic", f"has more than {MAX_OVERRIDES} entries")
    overrides: list[tuple[Callable[[str], Any], Fields | None]] = []
    for key in section.raw:
        pattern = compile_regex(fields, "dynamic", key.removeprefix("-:").removeprefix("+:"))
        changed = None if key.startswith("-:") else section.section(key) or Fields({}, section.source)
        overrides.append((pattern.match, changed))
    return overrides


def exact_or_regex(fields: Fields, name: str, values: list[str]) -> Matches:
    """Match compressed-tensors' names: whole, or "re:" with a prefix expression."""
    names = {value for value in values if not value.startswith("re:")}
    patterns = [compile_regex(fields, name, value[3:]) for value in values if value.startswith("re:")]
    return lambda module: module in names or any(pattern.match(module) for pattern in patterns)


def wildcards(values: list[str]) -> Matches:
    """Match ModelOpt's names: whole (including submodules) or with `*`."""
    plain = {value for value in values if not set(value) & set("*?[")}
    patterns = [value for value in values if value not in plain]
    return lambda module: (
        any(parent in plain for parent in _parents(module)) or any(fnmatchcase(module, pattern) for pattern in patterns)
    )


def name_parts(values: list[str]) -> Matches:
    """Match names that contain a value as whole dotted parts ("layers.0.mlp", "v_proj")."""
    return lambda module: any(f".{value}." in f".{module}." for value in values)


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]

"""A small language for writing text with choices in it, and the expander that turns a rule into one sentence or story.

A grammar file holds sections. A section is a header `== name` and alternatives, one a line; an indented line goes on
with the alternative above it, `# ` opens a comment, and `*3 ` before an alternative makes it three times as likely.

    [red|blue|]    one of the parts, which may be empty
    <rule>         an alternative of that section
    <name:rule>    the same, remembered as `name`: the second time it gives the first answer
    {name}         a remembered value; a tuple gives any of its members
    {^name} <^rule> the same with a capital letter
    \\n             a line break
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

Context = dict[str, Any]  # remembered values: a string, or a tuple of strings to choose from
Node = tuple[str, Any]

SPECIAL = re.compile(r"[\[\]|<>{}]")
SENTENCE_START = re.compile(r"(^|[.!?]\s+\"?|[.!?]\"\n+|\n+\"?)([a-z])")
ARTICLE = re.compile(r"\b([Aa]) (?=[aei]|o(?!ne\b|nce\b)|u(?!ni|se)|honest|hour)")
SPACES = re.compile(r" {2,}")
ATTEMPTS_AT_NEW_VALUE = 8


class Grammar:
    """All sections of the given files, parsed once."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.lines: dict[str, list[str]] = {}
        for path in paths:
            self._read(path)
        self.tables = {name: [tuple(re.split(r" [=;] ", line)) for line in lines] for name, lines in self.lines.items()}
        self.rules = {name: [parse(line) for line in weighted(lines)] for name, lines in self.lines.items()}

    def _read(self, path: Path) -> None:
        current: list[str] | None = None
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip() or line.startswith("# "):
                continue
            if line.startswith("== "):
                current = self.lines.setdefault(line[3:].strip(), [])
            elif current is None:
                raise ValueError(f"{path.name}:{number}: text before the first section")
            elif line[0] == " " and current:
                current[-1] += " " + line.strip()
            else:
                current.append(line.strip())

    def table(self, name: str) -> list[tuple[str, ...]]:
        """The section's lines as rows: `key = value ; value` gives (key, value, value)."""
        return self.tables[name]

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.rules if name.startswith(prefix)]

    def expand(self, rule: str, context: Context, rng: Random) -> str:
        """One alternative of `rule` with everything in it resolved, not yet tidied."""
        return self._write(rng.choice(self.rules[rule]), context, rng)

    def parts(self, rule: str, context: Context, rng: Random) -> list[str]:
        """`expand`, but each section that the alternative names gives one string of its own."""
        nodes = rng.choice(self.rules[rule])
        return [self._write_node(kind, value, context, rng) for kind, value in nodes if kind != "text" or value.strip()]

    def text(self, rule: str, context: Context, rng: Random) -> str:
        """`expand`, then capitals at sentence starts, `an` before vowels and single spaces."""
        return tidy(self.expand(rule, context, rng))

    def tidied(self, alternative: list[Node], context: Context, rng: Random) -> str:
        """`text` of one given alternative."""
        return tidy(self._write(alternative, context, rng))

    def _write(self, nodes: list[Node], context: Context, rng: Random) -> str:
        return "".join(self._write_node(kind, value, context, rng) for kind, value in nodes)

    def _write_node(self, kind: str, value: Any, context: Context, rng: Random) -> str:
        if kind == "text":
            return value
        if kind == "choice":
            return self._write(rng.choice(value), context, rng)
        capital, name, rule = value
        if rule is None:
            found = context[name]
            out = rng.choice(found) if isinstance(found, tuple) else found
        elif name is None:
            out = self.expand(rule, context, rng)
        else:
            out = self._remember(name, rule, context, rng)
        return out[:1].upper() + out[1:] if capital else out

    def _remember(self, name: str, rule: str, context: Context, rng: Random) -> str:
        if name not in context:
            taken = {value for value in context.values() if isinstance(value, str)}
            for _ in range(ATTEMPTS_AT_NEW_VALUE):
                value = self.expand(rule, context, rng)
                if value not in taken:
                    break
            context[name] = value
        return context[name]


def weighted(lines: list[str]) -> list[str]:
    out: list[str] = []
    for line in lines:
        times = re.match(r"\*(\d+) ", line)
        out += [line[times.end() :]] * int(times[1]) if times else [line]
    return out


def parse(line: str) -> list[Node]:
    """The nodes of one alternative. Raises ValueError where brackets do not match."""
    parts, rest = _parse_parts(line.replace("\\n", "\n"), 0, closing="")
    if rest != len(line.replace("\\n", "\n")) or len(parts) != 1:
        raise ValueError(f"brackets do not match: {line!r}")
    return parts[0]


def _parse_parts(line: str, start: int, closing: str) -> tuple[list[list[Node]], int]:
    """The alternatives between `start` and `closing`, and where reading stopped."""
    parts: list[list[Node]] = [[]]
    position = start
    while match := SPECIAL.search(line, position):
        if match.start() > position:
            parts[-1].append(("text", line[position : match.start()]))
        mark, position = match[0], match.end()
        if mark == "[":
            inner, position = _parse_parts(line, position, closing="]")
            parts[-1].append(("choice", inner))
        elif mark in "<{":
            end = line.index(">" if mark == "<" else "}", position)
            parts[-1].append((mark, _reference(line[position:end], is_rule=mark == "<")))
            position = end + 1
        elif mark == "|" and closing:
            parts.append([])
        elif mark == closing:
            return parts, position
        else:
            raise ValueError(f"brackets do not match: {line!r}")
    if closing:
        raise ValueError(f"a bracket is left open: {line!r}")
    if position < len(line):
        parts[-1].append(("text", line[position:]))
    return parts, len(line)


def _reference(body: str, *, is_rule: bool) -> tuple[bool, str | None, str | None]:
    capital = body.startswith("^")
    name, _, rule = body.removeprefix("^").rpartition(":")
    return (capital, name or None, rule) if is_rule else (capital, rule, None)


def tidy(text: str) -> str:
    text = SPACES.sub(" ", text).replace(" ,", ",").replace(" .", ".")
    text = re.sub(r" *\n *", "\n", text).strip()
    text = mend_articles(text)
    return SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)


def mend_articles(text: str) -> str:
    """`a apple` becomes `an apple`."""
    return ARTICLE.sub(r"\1n ", text)

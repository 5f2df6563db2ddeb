"""Prevents user text from spelling control tokens in a rendered chat template.

Before rendering, the first character of each spelling becomes a placeholder; it is restored once special tokens are
recognised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

PLACEHOLDERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters, meaningless in text


class SpecialTokenEscaper:
    """Escapes user text that could spell a special token, alone or joined to template literals."""

    def __init__(self, specials: Iterable[str], literals: Iterable[str], words: Iterable[str]) -> None:
        """Take the texts that the template outputs (`literals`) and the strings it compares or looks up (`words`).

        User text in `words` is escaped only if it has a whole special token: the template must recognise it.
        """
        specials = list(specials)
        literals = [literal for literal in literals if literal]
        self._words = frozenset(words)
        self._whole = re.compile(f"(?={'|'.join(map(re.escape, specials)) or '(?!)'})")
        self._starts = frozenset(token[:n] for token in specials for n in range(1, len(token)))
        self._longest_start = max(map(len, self._starts), default=0)
        open_starts = {start for start in self._starts if any(literal.endswith(start) for literal in literals)}
        self._rests = {t[len(start) :] for t in specials for start in open_starts if t.startswith(start)}
        self._reserved = frozenset("".join(literals)) & frozenset(PLACEHOLDERS)

    def escape(self, variables: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
        """Return the escaped `variables` (JSON values) and each placeholder's original character.

        Raises ValueError if the conversation leaves too few noncharacters unused.
        """
        hidden: set[str] = set()
        used: set[str] = set(self._reserved)

        def note(text: str) -> str:
            hidden.update(text[i] for i in self._spelling_starts(text))
            return text

        def collect(text: str) -> str:
            used.update(text)
            return text

        for value in variables.values():
            _map_strings(value, note)
        if not hidden:
            return variables, {}
        for value in variables.values():
            _map_strings(value, collect)
        free = [placeholder for placeholder in PLACEHOLDERS if placeholder not in used]
        if len(free) < len(hidden):
            raise ValueError("the conversation is full of Unicode noncharacters")
        placeholders = dict(zip(sorted(hidden), free, strict=False))

        def replace(text: str) -> str:
            characters = list(text)
            for i in self._spelling_starts(text):
                characters[i] = placeholders[characters[i]]
            return "".join(characters)

        escaped = {name: _map_strings(value, replace) for name, value in variables.items()}
        return escaped, {placeholder: character for character, placeholder in placeholders.items()}

    def _spelling_starts(self, text: str) -> set[int]:
        whole = {match.start() for match in self._whole.finditer(text)}
        if text in self._words:
            return whole
        return (
            whole
            | self._starts_cut_off_at(text, len(text))
            | self._starts_cut_off_at(text, len(text.rstrip()))
            | self._continuation_start(text)
        )

    def _starts_cut_off_at(self, text: str, end: int) -> set[int]:
        first = max(0, end - self._longest_start)
        return {i for i in range(first, end) if text[i:end] in self._starts}

    def _continuation_start(self, text: str) -> set[int]:
        """Return the first non-blank index if it may complete a special token begun by a literal."""
        start = len(text) - len(text.lstrip())
        body = text[start:]
        continues = body and any(body.startswith(rest) or rest.startswith(body) for rest in self._rests)
        return {start} if continues else set()


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value

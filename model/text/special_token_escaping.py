"""Keeps user text from spelling control tokens in a rendered chat template.

Before rendering, the first character of every spelling in user text is replaced by a placeholder: a Unicode
noncharacter that the conversation does not contain. A control token in the rendered text was then written by the
template. Placeholders are replaced back after special tokens are recognised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters, meaningless in text


class Disguise:
    """Finds where user text could spell a special token, alone or joined to the template's text.

    A spelling that begins in user text is either whole or cut off at the end of the string. One that begins in the
    template's text can only begin at the end of one of its literals; few templates have such literals.
    """

    def __init__(self, specials: Iterable[str], literals: Iterable[str], words: Iterable[str]) -> None:
        """`literals` are the texts that the template writes, `words` the strings that it compares with or looks up.

        A string equal to one of `words` is escaped only if it holds a whole special token: otherwise the template would
        not recognise it.
        """
        specials = list(specials)
        literals = [literal for literal in literals if literal]
        self._words = frozenset(words)
        self._whole = re.compile(f"(?={'|'.join(map(re.escape, specials)) or '(?!)'})")
        self._starts = frozenset(token[:n] for token in specials for n in range(1, len(token)))
        self._longest_start = max(map(len, self._starts), default=0)
        open_starts = {start for start in self._starts if any(literal.endswith(start) for literal in literals)}
        self._rests = {t[len(start) :] for t in specials for start in open_starts if t.startswith(start)}
        self._reserved = frozenset("".join(literals)) & frozenset(STAND_INS)

    def put_on(self, variables: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
        """Return `variables` (JSON values by name) with placeholders, and the original character of each placeholder.

        Raises ValueError if the conversation itself uses up all noncharacters.
        """
        hidden: set[str] = set()
        used: set[str] = set(self._reserved)

        def note(text: str) -> str:
            hidden.update(text[i] for i in self._positions(text))
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
        free = [stand_in for stand_in in STAND_INS if stand_in not in used]
        if len(free) < len(hidden):
            raise ValueError("the conversation is full of Unicode noncharacters")
        stand_ins = dict(zip(sorted(hidden), free, strict=False))

        def replace(text: str) -> str:
            characters = list(text)
            for i in self._positions(text):
                characters[i] = stand_ins[characters[i]]
            return "".join(characters)

        disguised = {name: _map_strings(value, replace) for name, value in variables.items()}
        return disguised, {stand_in: character for character, stand_in in stand_ins.items()}

    def _positions(self, text: str) -> set[int]:
        """Return where in `text` a special token begins, or may begin once the template's text follows."""
        whole = {match.start() for match in self._whole.finditer(text)}
        if text in self._words:
            return whole
        return whole | self._cut_off(text, len(text)) | self._cut_off(text, len(text.rstrip())) | self._continued(text)

    def _cut_off(self, text: str, end: int) -> set[int]:
        """Return where special tokens begin that are cut off at `end`."""
        first = max(0, end - self._longest_start)
        return {i for i in range(first, end) if text[i:end] in self._starts}

    def _continued(self, text: str) -> set[int]:
        """Return the first character after blanks if it may continue a special token that a literal began."""
        start = len(text) - len(text.lstrip())
        body = text[start:]
        continues = body and any(body.startswith(rest) or rest.startswith(body) for rest in self._rests)
        return {start} if continues else set()


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a JSON value with every string and key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value

"""Keeps user text from spelling control tokens in a rendered chat template.

Before rendering, the first character of every spelling is replaced by a stand-in: a Unicode noncharacter that occurs
nowhere in the conversation. What then spells a control token was written by the template. The stand-ins are put back
when the special tokens have been read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: no text means anything by them


class Disguise:
    """Where user text could spell a special token, alone or together with what a template writes beside it.

    A spelling that begins in user text is found there: it is whole, or it is cut off at the end of the string. One
    that begins in the template's own text can only begin at the end of one of its literals; few templates have such.
    """

    def __init__(self, specials: Iterable[str], literals: Iterable[str], words: Iterable[str]) -> None:
        """`literals` are the texts that the template writes; `words` those that it compares with or looks up.

        A string that equals one of `words` is left alone unless it holds a whole special token, for otherwise the
        template would not know it any more.
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
        """`variables` (JSON values by name) with stand-ins where needed, and the character that each stands for.

        ValueError if the conversation uses up all noncharacters itself.
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
        """Where in `text` a special token begins, or might once the template has written on."""
        whole = {match.start() for match in self._whole.finditer(text)}
        if text in self._words:
            return whole
        return whole | self._cut_off(text, len(text)) | self._cut_off(text, len(text.rstrip())) | self._continued(text)

    def _cut_off(self, text: str, end: int) -> set[int]:
        """Where a special token begins that `end` cuts off."""
        first = max(0, end - self._longest_start)
        return {i for i in range(first, end) if text[i:end] in self._starts}

    def _continued(self, text: str) -> set[int]:
        """The first character, spaces aside, if it could continue a special token that a literal has begun."""
        start = len(text) - len(text.lstrip())
        body = text[start:]
        continues = body and any(body.startswith(rest) or rest.startswith(body) for rest in self._rests)
        return {start} if continues else set()


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string and every key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value

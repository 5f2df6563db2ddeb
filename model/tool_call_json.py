"""A call of a function as a JSON object, read character by character."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from model.tool_call_reader import BLANKS, CallReader

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEY = "name"


class JsonCallReader(CallReader):
    """One call, character by character."""

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        """With a `name` only the arguments are read."""
        super().__init__(name, self._before_object if name is None else self._before_value)
        self._names = names
        self._only_arguments = name is not None
        self._key = "" if name is None else ARGUMENT_KEYS[0]
        self._value: list[str] = []  # of a key, or as far as it may be a name or arguments in a string
        self._depth = 0
        self._in_string = self._is_escaped = False

    def _before_object(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in BLANKS:
            self.is_bad = True

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._value, self._in_string, self._state = [char], True, self._in_key
        elif char == "}":
            self._end_object()
        elif char not in BLANKS:
            self.is_bad = True

    def _in_key(self, char: str) -> None:
        if self._string_ends(char):
            self._key = _decoded(self._value) or ""
            self._state = self._before_colon

    def _before_colon(self, char: str) -> None:
        if char == ":":
            self._state = self._before_value
        elif char not in BLANKS:
            self.is_bad = True

    def _before_value(self, char: str) -> None:
        if char in BLANKS:
            return
        self._value, self._depth, self._state = [], 0, self._in_value
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if self._in_string:
            ends = self._string_ends(char)
            self._tell(char)
            if ends and self._depth == 0:
                self._end_value()
            return
        if self._depth == 0 and self._value and char in BLANKS + ",}]":
            self._end_value()
            if not self.is_bad:
                self._state(char)
            return
        self._value.append(char)
        self._tell(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth < 0:
                self.is_bad = True
            elif self._depth == 0:
                self._end_value()

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            self._end_object()
        elif char not in BLANKS:
            self.is_bad = True

    def _string_ends(self, char: str) -> bool:
        """Takes a character of a string, and says whether it is its closing quote."""
        self._value.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
        return not self._in_string

    def _tell(self, char: str) -> None:
        # Arguments in a string are JSON inside JSON: told once they can be decoded.
        if self._key in ARGUMENT_KEYS:
            self._has_arguments = True
            if self._value[0] != '"':
                self._arguments.append(char)

    def _end_value(self) -> None:
        self._state = self._after_value
        if self._key == NAME_KEY:
            name = _decoded(self._value)
            self.name, self.is_bad = name, name not in self._names
        elif self._key in ARGUMENT_KEYS and self._value[0] == '"':
            self._arguments.append(_decoded(self._value) or "")
        if self._only_arguments:
            self._end_object()

    def _end_object(self) -> None:
        self.is_done, self.is_bad = self.name is not None, self.is_bad or self.name is None


def _decoded(literal: Sequence[str]) -> str | None:
    """The text of a JSON string; None for any other value."""
    try:
        value = json.loads("".join(literal), strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None

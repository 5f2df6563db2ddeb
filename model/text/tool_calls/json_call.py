"""Strict reader of a function call as a JSON object, character by character."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from model.text.tool_calls.reader import BLANKS, CallReader

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEY = "name"
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = frozenset("0123456789+-.eEtrufalsn")
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonCallReader(CallReader):
    """Escapes control characters that models write in strings, skips unknown keys and keeps the first of duplicates."""

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        """Read only the arguments if `name` is given."""
        super().__init__(name, self._before_object if name is None else self._before_value)
        self._names = names
        self._top_depth = 1 if name is None else 0  # nesting depth of name and arguments
        self._stack: list[str] = []  # closing brackets of the open containers
        self._key = ""  # of the top-level value
        self._text: list[str] = []  # text of a top-level scalar or of a key
        self._is_escaped = self._is_key = False
        self._num_hex = 0  # remaining digits of \uXXXX
        self._is_emitting = False
        self._held_bracket = ""  # the arguments' closing bracket, held until the call is well-formed

    @property
    def _is_top(self) -> bool:
        return len(self._stack) == self._top_depth

    def _before_object(self, char: str) -> None:
        if char == "{":
            self._stack.append("}")
            self._state = self._before_first_key
        else:
            self.is_bad = char not in BLANKS

    def _before_first_key(self, char: str) -> None:
        if char == "}":
            self._close_container(char)
        else:
            self._before_key(char)

    def _before_key(self, char: str) -> None:
        self._emit(char)
        if char == '"':
            self._text, self._is_key, self._state = [char], True, self._in_string
        else:
            self.is_bad = char not in BLANKS

    def _before_colon(self, char: str) -> None:
        self._emit(char)
        if char == ":":
            self._state = self._before_value
        else:
            self.is_bad = char not in BLANKS

    def _before_first_item(self, char: str) -> None:
        if char == "]":
            self._close_container(char)
        else:
            self._before_value(char)

    def _before_value(self, char: str) -> None:
        if char in BLANKS:
            self._emit(char)
            return
        if self._is_top:
            self._begin_top(char)
        self._emit(char)
        self._text = [char]
        if char == "{":
            self._stack.append("}")
            self._state = self._before_first_key
        elif char == "[":
            self._stack.append("]")
            self._state = self._before_first_item
        elif char == '"':
            self._is_key, self._state = False, self._in_string
        elif char in _SCALAR_CHARS:
            self._state = self._in_scalar
        else:
            self.is_bad = True

    def _begin_top(self, char: str) -> None:
        self._is_emitting = False
        if self._top_depth == 0 or (self._key in ARGUMENT_KEYS and not self._has_arguments):
            # Arguments are an object or a string of one; null means none.
            self.is_bad = char not in '{"n' or (self._top_depth == 0 and char != "{")
            self._has_arguments = self._is_emitting = char == "{"

    def _in_scalar(self, char: str) -> None:
        if char in _SCALAR_CHARS:
            self._emit(char)
            self._text.append(char)
            return
        if not _SCALAR.fullmatch("".join(self._text)):
            self.is_bad = True
            return
        self._end_value()
        if not self.is_bad:
            self._state(char)

    def _in_string(self, char: str) -> None:
        self._emit(char if char >= " " else json.dumps(char)[1:-1])
        if self._is_key or self._is_top:
            self._text.append(char)
        if self._num_hex:
            self._num_hex -= 1
            self.is_bad = char not in _HEX
        elif self._is_escaped:
            self._is_escaped = False
            self._num_hex = 4 if char == "u" else 0
            self.is_bad = char not in '"\\/bfnrtu'
        elif char == "\\":
            self._is_escaped = True
        elif char == '"' and self._is_key:
            if self._is_top:
                self._key = _decoded(self._text)
            self._state = self._before_colon
        elif char == '"':
            self._end_value()

    def _after_value(self, char: str) -> None:
        if char == "," and self._stack:
            self._emit(char)
            self._state = self._before_key if self._stack[-1] == "}" else self._before_value
        elif self._stack and char == self._stack[-1]:
            self._close_container(char)
        elif char in BLANKS:
            self._emit(char)
        else:
            self.is_bad = True

    def _close_container(self, char: str) -> None:
        self._stack.pop()
        if self._is_emitting and self._is_top:
            self._is_emitting, self._held_bracket = False, char
        self._emit(char)
        if self._stack or self._top_depth == 0:
            self._end_value()
        if not self._stack:
            self._finish()

    def _end_value(self) -> None:
        self._state = self._after_value
        if not self._is_top or self._top_depth == 0:
            return
        text = self._text
        if self._key == NAME_KEY and self.name is None and text[0] == '"':
            name = _decoded(text)
            self.name = name if name in self._names else None
            self._key = "" if self.name is None else self._key
        elif self._key in ARGUMENT_KEYS and not self._has_arguments and text[0] in '"n':
            found = _object_json(_decoded(text)) if text[0] == '"' else "{}"
            self._has_arguments, self.is_bad = True, found is None
            self._arguments.append((found or "")[:-1])
            self._held_bracket = (found or "")[-1:]

    def _finish(self) -> None:
        self.is_done = True
        self._arguments.append(self._held_bracket if self._has_arguments else "{}")

    def _emit(self, char: str) -> None:
        if self._is_emitting:
            self._arguments.append(char)


def _decoded(literal: Sequence[str]) -> str:
    text: str = json.loads("".join(literal), strict=False)
    return text


def _object_json(text: str) -> str | None:
    """Return the JSON object in a string; None for anything else."""
    text = text.strip(BLANKS)
    if not text:
        return "{}"
    try:
        value = json.loads(text, strict=False, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return escape_controls(text) if isinstance(value, dict) else None


def _refuse(word: str) -> Any:
    raise ValueError(word)


def escape_controls(text: str) -> str:
    """Escape control characters within JSON strings."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda m: re.sub(r"[\x00-\x1f]", _escaped, m[0]), text, flags=re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]

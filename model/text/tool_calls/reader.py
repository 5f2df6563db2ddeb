"""Base of the readers of one function call, which turn characters into arguments as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class Function:
    name: str
    parameters: Any  # JSON schema
    is_strict: bool = False  # enforce the schema even if tool_choice is auto


class CallReader:
    """State machine; `is_done` without `is_call` means no call of a known function."""

    def __init__(self, name: str | None, state: Callable[[str], None]) -> None:
        self.name = name  # None until a known function's is read
        self.has_opened = False  # read a Python call's parenthesis
        self.is_done = False
        self.is_bad = False  # malformed
        self._state = state
        self._arguments: list[str] = []  # JSON not yet returned
        self._has_arguments = False

    @property
    def is_call(self) -> bool:
        return self.name is not None and not self.is_bad and (self._has_arguments or self.is_done)

    def feed(self, char: str) -> None:
        """Read the next character; not allowed once `is_done` or `is_bad`."""
        num_before = len(self._arguments)
        self._state(char)
        if self.is_bad:
            del self._arguments[num_before:]

    def take_arguments(self) -> str:
        """Return the new part of the arguments; all parts are valid JSON once `is_done`."""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

"""Base class of function call readers, which turn characters into JSON arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class Function:
    name: str
    parameters: Any  # JSON schema
    is_strict: bool = False  # enforce the schema even with tool_choice auto


class CallReader:
    """State machine; `is_done` without `is_call` means that no known function is called."""

    def __init__(self, name: str | None, state: Callable[[str], None]) -> None:
        self.name = name  # None until a known function's name is read
        self.has_opened = False  # a Python call's parenthesis was read
        self.is_done = False
        self.is_bad = False  # malformed
        self._state = state
        self._arguments: list[str] = []  # JSON not yet returned
        self._has_arguments = False

    @property
    def is_call(self) -> bool:
        return self.name is not None and not self.is_bad and (self._has_arguments or self.is_done)

    def feed(self, char: str) -> None:
        """Read the next character; invalid once `is_done` or `is_bad`."""
        num_before = len(self._arguments)
        self._state(char)
        if self.is_bad:
            del self._arguments[num_before:]

    def take_arguments(self) -> str:
        """Return the new part of the arguments; once `is_done`, the parts join to valid JSON."""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

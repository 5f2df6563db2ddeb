"""The base of the readers of one call: fed by characters, they report its arguments as JSON while these come."""

from __future__ import annotations

from collections.abc import Callable

BLANKS = " \t\r\n"


class CallReader:
    """One call. A subclass sets `_state` to the method that takes the next character.

    `is_done` and not `is_call`: well-formed, but no call of a known function. `is_bad`: malformed at the last
    character.
    """

    def __init__(self, name: str | None, state: Callable[[str], None]) -> None:
        self.name = name  # of a known function; None until it is read
        self.is_done = False
        self.is_bad = False
        self._state = state
        self._arguments: list[str] = []  # JSON, not yet taken
        self._has_arguments = False

    @property
    def is_call(self) -> bool:
        """Whether the name is known, and the arguments have begun or the call is done."""
        return self.name is not None and not self.is_bad and (self._has_arguments or self.is_done)

    def feed(self, char: str) -> None:
        """Read the next character; not once `is_done` or `is_bad`."""
        num_told = len(self._arguments)
        self._state(char)
        if self.is_bad:
            del self._arguments[num_told:]

    def take_arguments(self) -> str:
        """Return the new part of the arguments. All parts together are valid JSON only once `is_done`."""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

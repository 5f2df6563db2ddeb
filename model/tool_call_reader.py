"""What all readers of calls of functions share: they are fed by characters, and tell arguments as these come."""

from __future__ import annotations

from collections.abc import Callable

BLANKS = " \t\r\n"


class CallReader:
    """One call. What comes next in it is its reader's own: a state is what to do with a character."""

    def __init__(self, name: str | None, state: Callable[[str], None]) -> None:
        self.name = name
        self.is_done = False
        self.is_bad = False
        self._state = state
        self._read: list[str] = []
        self._arguments: list[str] = []  # not yet taken
        self._has_arguments = False

    @property
    def is_call(self) -> bool:
        """Whether enough is known to say so: its name, and that its arguments begin or that it has none."""
        return self.name is not None and not self.is_bad and (self._has_arguments or self.is_done)

    @property
    def raw(self) -> str:
        """All it has read, for what turns out to be no call."""
        return "".join(self._read)

    def feed(self, char: str) -> None:
        """The next character behind the opening; not once `is_done` or `is_bad`."""
        self._read.append(char)
        self._state(char)

    def take_arguments(self) -> str:
        """What is new of them, once the name is known."""
        if self.name is None:
            return ""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

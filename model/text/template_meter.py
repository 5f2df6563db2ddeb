"""What one rendering of a chat template has made, and the bounds on it: each operation is counted before it is done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

MAX_ITEMS = 1 << 20
"""Of a list, or in all of a nested value."""
MAX_INT_BITS = 1 << 14
ITEM_CHARS = 8
"""An item of a list counts as so many characters, in memory."""
REPR_GROWTH = 10
"""Python's longest way to write a character within quotes: \\U0001f600."""
NODES_A_LOOK = 1 << 12


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """What one rendering may make and take; SecurityError beyond."""

    max_chars: int = 16 * 2**20  # of the rendered text, and of any value that is made on the way
    max_made: int = 512 * 2**20  # of all values together, those that are dropped again too
    max_s: float = 2.0  # of CPU time


class Meter:
    """Of one rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self.max_chars = limits.max_chars
        self._num_made = 0
        self._deadline_s = time.thread_time() + limits.max_s

    def tick(self) -> None:
        """Raises SecurityError once the time is over."""
        if time.thread_time() > self._deadline_s:
            raise SecurityError("the template takes too long")

    def make(self, num_chars: int) -> None:
        """To be called before so much is made. Raises SecurityError."""
        self.tick()
        self._num_made += num_chars
        if num_chars > self._limits.max_chars or self._num_made > self._limits.max_made:
            raise SecurityError("a value is too large")

    def make_items(self, num_items: int) -> None:
        """The same of a list. Raises SecurityError."""
        if num_items > MAX_ITEMS:
            raise SecurityError("a list is too long")
        self.make(ITEM_CHARS * num_items)

    def weigh(self, value: Any) -> int:
        """Characters in a value, nested ones and their marks included, counted wherever they occur. Raises
        SecurityError for one that is too large, has too many parts, or contains itself."""
        if isinstance(value, str):
            return len(value)
        num_chars, num_nodes, rest = 0, 0, [value]
        while rest:
            value = rest.pop()
            num_nodes += 1
            if isinstance(value, str | bytes):
                num_chars += len(value)
                continue
            num_chars += ITEM_CHARS
            if isinstance(value, int):
                self.check_int(value)
                num_chars += value.bit_length() // 3
            elif (parts := _parts(value)) is not None:
                if num_nodes + len(rest) + len(parts) > MAX_ITEMS:
                    raise SecurityError("a value has too many parts")
                rest.extend(parts)
            if num_nodes % NODES_A_LOOK == 0:
                self.tick()
        if num_chars > self._limits.max_chars:
            raise SecurityError("a value is too large")
        return num_chars

    def check_int(self, value: int) -> None:
        if value.bit_length() > MAX_INT_BITS:
            raise SecurityError("a number is too large")

    def ticked(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, with a look at the clock before each."""
        for value in values:
            self.tick()
            yield value

    def listed(self, values: Any) -> Any:
        """`values`, with an end: those of an iterator in a list, others as they are. Raises SecurityError."""
        if not hasattr(values, "__next__"):
            if hasattr(values, "__len__"):
                self.make_items(len(values))
            return values
        found: list[Any] = []
        for value in values:
            self.make(ITEM_CHARS)
            if len(found) >= MAX_ITEMS:
                raise SecurityError("a list is too long")
            found.append(value)
        return found


def _parts(value: Any) -> Any:
    """What is written when the value is; None where that is nothing else."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()] if len(value) <= MAX_ITEMS else range(MAX_ITEMS + 1)
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    if isinstance(value, list | tuple | set | frozenset | type({}.keys()) | type({}.values()) | type({}.items())):
        return value
    return None

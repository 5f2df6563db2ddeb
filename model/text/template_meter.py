"""Limits on the time and memory of one chat template rendering: each operation is charged before it runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

MAX_ITEMS = 1 << 20
"""Items of a list, or of a nested value in all."""
MAX_INT_BITS = 1 << 14
ITEM_CHARS = 8
"""Charge for a list item, in characters."""
REPR_GROWTH = 10
r"""Length of Python's longest escape in quotes, \U0001f600."""
NODES_A_LOOK = 1 << 12


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """Limits of one rendering; SecurityError beyond."""

    max_chars: int = 16 * 2**20  # of the rendered text, and of any intermediate value
    max_made: int = 512 * 2**20  # of all values together, dropped ones included
    max_s: float = 2.0  # CPU time


class Meter:
    """Counts what one rendering makes."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self.max_chars = limits.max_chars
        self._num_made = 0
        self._deadline_s = time.thread_time() + limits.max_s

    def tick(self) -> None:
        """Raise SecurityError if the time is up."""
        if time.thread_time() > self._deadline_s:
            raise SecurityError("the template takes too long")

    def make(self, num_chars: int) -> None:
        """Charge `num_chars`, before they are made. Raises SecurityError beyond the limits."""
        self.tick()
        self._num_made += num_chars
        if num_chars > self._limits.max_chars or self._num_made > self._limits.max_made:
            raise SecurityError("a value is too large")

    def make_items(self, num_items: int) -> None:
        """Charge a list of `num_items`. Raises SecurityError beyond the limits."""
        if num_items > MAX_ITEMS:
            raise SecurityError("a list is too long")
        self.make(ITEM_CHARS * num_items)

    def weigh(self, value: Any) -> int:
        """Return the characters of a value with its nested values, each occurrence counted.

        Raises SecurityError if it is too large, has too many parts or contains itself.
        """
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
        """Yield `values`, checking the time before each."""
        for value in values:
            self.tick()
            yield value

    def listed(self, values: Any) -> Any:
        """Return `values` with bounded length: an iterator as a list, others unchanged. Raises SecurityError."""
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
    """Return the values inside a container; None for other values."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()] if len(value) <= MAX_ITEMS else range(MAX_ITEMS + 1)
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    if isinstance(value, list | tuple | set | frozenset | type({}.keys()) | type({}.values()) | type({}.items())):
        return value
    return None

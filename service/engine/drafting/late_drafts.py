from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import overload


class LateDrafts(Seq[int]):
    """Draft tokens of `rows` of the runner's `sampled`, which the host may not have seen. Reading one waits."""

    __slots__ = ("_read", "rows")

    def __init__(self, rows: Seq[int], read: Callable[[], Seq[int]]):
        """`read` returns the tokens of `rows`."""
        self.rows, self._read = rows, read

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> LateDrafts: ...
    def __getitem__(self, index: int | slice) -> int | LateDrafts:
        if isinstance(index, slice):
            read = self._read
            return LateDrafts(self.rows[index], lambda: read()[index])
        return self._read()[index]

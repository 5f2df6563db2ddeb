"""Arrays of a group: one of equal shape on each rank, handled as one. Shapes are a rank's own.

An operation is done on every rank before the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from model.ops.weight import Array


class Section(NamedTuple):
    """A run of an axis that is divided by itself, as q in a stacked q, k and v."""

    size: int
    copies: int = 1  # neighbouring ranks that hold the same part


class Range(NamedTuple):
    """Elements `start` to `stop` of the whole, which a rank holds from `at` on."""

    at: int
    start: int
    stop: int


@dataclass(frozen=True)
class Split:
    """Division of an axis: each section by equal parts, the last of which may be padded."""

    axis: int
    sections: tuple[Section, ...]

    @property
    def size(self) -> int:
        """Return the whole's length."""
        return sum(section.size for section in self.sections)

    def part_size(self, num_ranks: int) -> int:
        return sum(_width(section, num_ranks) for section in self.sections)

    def part_shape(self, shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
        """Return a rank's part of an array of this `shape`."""
        return (*shape[: self.axis], self.part_size(num_ranks), *shape[self.axis + 1 :])

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the whole of parts of this `shape`."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def part_of(self, whole: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
        """Return a rank's part of `whole`, padded with zeros."""
        part = np.zeros(self.part_shape(whole.shape, num_ranks), whole.dtype)
        before = (slice(None),) * self.axis
        for at, start, stop in self.ranges(rank, num_ranks):
            part[(*before, slice(at, at + stop - start))] = whole[(*before, slice(start, stop))]
        return part

    def ranges(self, rank: int, num_ranks: int) -> Iterator[Range]:
        """Yield a rank's elements of each section."""
        at = begin = 0
        for section in self.sections:
            width = _width(section, num_ranks)
            start = min(rank // section.copies * width, section.size)
            yield Range(at, begin + start, begin + min(start + width, section.size))
            at, begin = at + width, begin + section.size


def _width(section: Section, num_ranks: int) -> int:
    return -(-section.size * section.copies // num_ranks)


@dataclass(frozen=True, eq=False)
class GroupArray:
    """One array per rank; downloaded, they must be equal."""

    parts: tuple[Array, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.parts[0].shape
        return shape

    @property
    def dtype(self) -> np.dtype:
        dtype: np.dtype = self.parts[0].dtype
        return dtype

    @property
    def size(self) -> int:
        return int(self.parts[0].size)

    @property
    def nbytes(self) -> int:
        return int(self.parts[0].nbytes)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, key: Any) -> GroupArray:
        return replace(self, parts=tuple(part[key] for part in self.parts))

    def __setitem__(self, key: Any, value: Any) -> None:
        for rank, part in enumerate(self.parts):
            part[key] = on_rank(value, rank)

    def reshape(self, *shape: Any) -> GroupArray:
        return GroupArray(tuple(part.reshape(*shape) for part in self.parts))

    def view(self, dtype: Any) -> GroupArray:
        return replace(self, parts=tuple(part.view(dtype) for part in self.parts))


@dataclass(frozen=True, eq=False)
class SplitArray(GroupArray):
    """Parts of a whole. As a weight's data, `split` is that of the matrix [N, K], in any form in memory."""

    split: Split

    def __getitem__(self, key: Any) -> GroupArray:
        if self.split.axis == 0:
            raise TypeError("a group's array that is divided by rows has no rows in common to index")
        return super().__getitem__(key)


@dataclass(frozen=True, eq=False)
class PartialSums(GroupArray):
    """Summands of one array. Only operations that sum them take them."""


def divided(array: Array, split: Split | None) -> Array:
    """Return the array with this `split`; unchanged without one, or on a single device."""
    if split is None or not isinstance(array, GroupArray):
        return array
    return SplitArray(array.parts, split)


def stacked(splits: Sequence[Split | None]) -> Split | None:
    first = splits[0]
    if first is None or first.axis:
        return first
    return Split(0, tuple(section for split in splits if split is not None for section in split.sections))


def product_split(data: Array) -> Split | None:
    """Return the split of products with this weight: by columns, if the matrix is divided by rows."""
    is_by_rows = isinstance(data, SplitArray) and data.split.axis == 0
    return replace(data.split, axis=1) if is_by_rows else None


def own_rows(array: GroupArray, split: Split) -> SplitArray:
    """Return each rank's rows of an array that all have, padded to equal parts."""
    size = split.part_size(len(array.parts))
    return SplitArray(tuple(part[rank * size : (rank + 1) * size] for rank, part in enumerate(array.parts)), split)


def each_rank(array: Array) -> Array:
    """Return an array that differs by rank, to be downloaded as [ranks * n, ...]."""
    if not isinstance(array, GroupArray):
        return array
    return divided(array, Split(0, (Section(len(array.parts) * len(array)),)))


def whole_shape(array: Array) -> tuple[int, ...]:
    """Return the shape of what the parts make up."""
    shape: tuple[int, ...] = array.shape
    return array.split.whole_shape(shape) if isinstance(array, SplitArray) else shape


def whole_nbytes(array: Array) -> int:
    return math.prod(whole_shape(array)) * int(array.dtype.itemsize)


_PLAIN = frozenset((type(None), bool, int, float, str))
"""Types without parts, tried first."""


def on_rank(value: Any, rank: int) -> Any:
    """Return a rank's own arrays, also inside of dataclasses and tuples. Raises TypeError for partial sums."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if issubclass(kind, GroupArray):
        if kind is PartialSums:
            raise TypeError("partial sums are taken by rms_norm and add_rms_norm alone")
        return value.parts[rank]
    if issubclass(kind, list | tuple):
        own = [on_rank(each, rank) for each in value]
        return own if issubclass(kind, list) else kind(*own) if hasattr(kind, "_fields") else tuple(own)
    changes = {}
    for name in _field_names(kind):
        before = getattr(value, name)
        after = on_rank(before, rank)
        if after is not before:
            changes[name] = after
    return replace(value, **changes) if changes else value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def joined(values: Sequence[Any]) -> Any:
    """Return the ranks' results as one."""
    first = values[0]
    kind: Any = type(first)
    if isinstance(first, list | tuple):
        return tuple(joined(each) for each in zip(*values, strict=True))
    if names := _field_names(kind):
        return replace(first, **{name: joined([getattr(value, name) for value in values]) for name in names})
    return GroupArray(tuple(values)) if hasattr(first, "dtype") else first

"""Arrays of a group: one of equal shape per rank, handled as one. Shapes are those of a rank.

An operation runs on every rank before the next one.
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
    """Run of an axis that is divided separately, such as q in a stacked q, k and v."""

    size: int
    copies: int = 1  # neighbouring ranks that hold the same part


class Range(NamedTuple):
    """Elements `start` to `stop` of the whole, stored by a rank from `at` on."""

    at: int
    start: int
    stop: int


@dataclass(frozen=True)
class Split:
    """Division of an axis: each section into equal parts, the last of which may be padded."""

    axis: int
    sections: tuple[Section, ...]

    @property
    def size(self) -> int:
        """Length of the whole."""
        return sum(section.size for section in self.sections)

    def part_size(self, num_ranks: int) -> int:
        return sum(_width(section, num_ranks) for section in self.sections)

    def part_shape(self, shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
        """Return the shape of a rank's part, given the whole's."""
        return (*shape[: self.axis], self.part_size(num_ranks), *shape[self.axis + 1 :])

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole, given a part's."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def part_of(self, whole: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
        """Return a rank's part of `whole`, padded with zeros."""
        part = np.zeros(self.part_shape(whole.shape, num_ranks), whole.dtype)
        before = (slice(None),) * self.axis
        for at, start, stop in self.ranges(rank, num_ranks):
            part[(*before, slice(at, at + stop - start))] = whole[(*before, slice(start, stop))]
        return part

    def ranges(self, rank: int, num_ranks: int) -> Iterator[Range]:
        """Yield a rank's range of each section."""
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
    """One array per rank. Downloaded arrays must be equal."""

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
    """Parts of a whole. A weight's data has the split of the matrix [N, K], whatever its layout in memory."""

    split: Split

    def __getitem__(self, key: Any) -> GroupArray:
        if self.split.axis == 0:
            raise TypeError("a group's array that is divided by rows has no rows in common to index")
        return super().__getitem__(key)


@dataclass(frozen=True, eq=False)
class PartialSums(GroupArray):
    """Summands of one array, accepted only by operations that sum them."""


def divided(array: Array, split: Split | None) -> Array:
    """Return the array with this `split`, or unchanged without one or on a single device."""
    if split is None or not isinstance(array, GroupArray):
        return array
    return SplitArray(array.parts, split)


def stacked(splits: Sequence[Split | None]) -> Split | None:
    first = splits[0]
    if first is None or first.axis:
        return first
    return Split(0, tuple(section for split in splits if split is not None for section in split.sections))


def product_split(data: Array) -> Split | None:
    """Return the split of products with this weight: by columns if the matrix is divided by rows, else None."""
    is_by_rows = isinstance(data, SplitArray) and data.split.axis == 0
    return replace(data.split, axis=1) if is_by_rows else None


def own_rows(array: GroupArray, split: Split) -> SplitArray:
    """Return each rank's rows of an array that all ranks have, padded to equal parts."""
    size = split.part_size(len(array.parts))
    return SplitArray(tuple(part[rank * size : (rank + 1) * size] for rank, part in enumerate(array.parts)), split)


def each_rank(array: Array) -> Array:
    """Return an array that differs by rank and is downloaded as [ranks * n, ...]."""
    if not isinstance(array, GroupArray):
        return array
    return divided(array, Split(0, (Section(len(array.parts) * len(array)),)))


def whole_shape(array: Array) -> tuple[int, ...]:
    """Return the shape of the array, joined from its parts."""
    shape: tuple[int, ...] = array.shape
    return array.split.whole_shape(shape) if isinstance(array, SplitArray) else shape


def whole_nbytes(array: Array) -> int:
    return math.prod(whole_shape(array)) * int(array.dtype.itemsize)


_PLAIN = frozenset((type(None), bool, int, float, str))
"""Types without parts, checked first."""


def on_rank(value: Any, rank: int) -> Any:
    """Return a rank's own arrays, also inside dataclasses and tuples. Raises TypeError for partial sums."""
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
    """Join the ranks' results."""
    first = values[0]
    kind: Any = type(first)
    if isinstance(first, list | tuple):
        return tuple(joined(each) for each in zip(*values, strict=True))
    if names := _field_names(kind):
        return replace(first, **{name: joined([getattr(value, name) for value in values]) for name in names})
    return GroupArray(tuple(values)) if hasattr(first, "dtype") else first

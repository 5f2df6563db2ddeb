"""Loads a group's arrays: each whole is read once, and each rank takes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from model.ops.group.arrays import GroupArray, Range, SplitArray, whole_shape
from model.ops.interface import PartOps
from model.ops.load_parallel import Piece, load_in_threads
from model.ops.weight import Array

CHUNK_BYTES = 256 << 20
"""Host memory for what is read and not yet on the ranks, unless one row is larger."""

Read = Callable[[int, int, np.ndarray], None]


@dataclass(frozen=True)
class _Chunk:
    """Rows `first` to `first + len(host)` of a whole target."""

    target: int
    array: GroupArray
    first: int
    host: np.ndarray

    @property
    def start(self) -> int:
        return self.first * (self.host.size // len(self.host))


@dataclass(frozen=True)
class _Part:
    """A rank's rows of a chunk, [n, ...], and where they go."""

    into: Array
    slices: list[np.ndarray]  # side by side along `axis`
    axis: int

    def read_into(self, start: int, out: np.ndarray) -> None:
        width = self.into.size // len(self.into)
        first, last = start // width, -(-(start + out.size) // width)
        rows = [part[first:last] for part in self.slices]
        values = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=self.axis)
        begin = start - first * width
        out[...] = values.reshape(-1)[begin : begin + out.size]


def load_group(ranks: Sequence[PartOps], targets: Sequence[GroupArray], read: Read) -> None:
    """Fill `targets`: see `Device.load_parallel`, with positions in the wholes. Padding gets zeros."""
    with ThreadPoolExecutor(len(ranks), "rank") as threads:

        def on_each(load: Callable[[int, PartOps], None]) -> None:
            """Fill all ranks at once: each has a bus of its own."""
            for done in [threads.submit(load, number, rank) for number, rank in enumerate(ranks)]:
                done.result()

        on_each(partial(_load_padding, targets, len(ranks)))
        for chunks in _chunks(targets):
            load_in_threads([chunk.host for chunk in chunks], partial(_read_pieces, chunks, read))
            on_each(partial(_load_parts, chunks, len(ranks)))


def _load_parts(chunks: Sequence[_Chunk], num_ranks: int, number: int, rank: PartOps) -> None:
    parts = [part for chunk in chunks for part in _parts_of(chunk, number, num_ranks)]
    rank.use()
    rank.load_parallel([part.into for part in parts], partial(_copy, parts))


def _load_padding(targets: Sequence[GroupArray], num_ranks: int, number: int, rank: PartOps) -> None:
    padding = [rows for array in targets for rows in _padding_of(array, number, num_ranks)]
    if padding:
        rank.use()
        rank.load_parallel(padding, _zero)


def _read_pieces(chunks: Sequence[_Chunk], read: Read, pieces: Iterator[Piece]) -> None:
    for piece in pieces:
        chunk = chunks[piece.target]
        read(chunk.target, chunk.start + piece.start, chunk.host.reshape(-1)[piece.start : piece.stop])


def _zero(index: int, start: int, out: np.ndarray) -> None:
    out.fill(0)


def _padding_of(array: GroupArray, rank: int, num_ranks: int) -> Iterator[Array]:
    """Yield a rank's rows that are no rows of the whole; padded columns are loaded with the others."""
    if not isinstance(array, SplitArray) or array.split.axis:
        return
    end = Range(len(array), 0, 0)
    for (at, start, stop), following in pairwise([*array.split.ranges(rank, num_ranks), end]):
        if at + stop - start < following.at:
            yield array.parts[rank][at + stop - start : following.at]


def _copy(parts: Sequence[_Part], index: int, start: int, out: np.ndarray) -> None:
    parts[index].read_into(start, out)


def _chunks(targets: Sequence[GroupArray]) -> Iterator[list[_Chunk]]:
    """Yield chunks of all targets, CHUNK_BYTES at once."""
    held: list[_Chunk] = []
    num_bytes = 0
    for index, array in enumerate(targets):
        shape = whole_shape(array)
        row_bytes = int(np.prod(shape[1:])) * array.dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for first in range(0, shape[0], step):
            rows = min(step, shape[0] - first)
            if held and num_bytes + rows * row_bytes > CHUNK_BYTES:
                yield held
                held, num_bytes = [], 0
            held.append(_Chunk(index, array, first, np.empty((rows, *shape[1:]), array.dtype)))
            num_bytes += rows * row_bytes
    if held:
        yield held


def _parts_of(chunk: _Chunk, rank: int, num_ranks: int) -> Iterator[_Part]:
    first, last, own = chunk.first, chunk.first + len(chunk.host), chunk.array.parts[rank]
    if not isinstance(chunk.array, SplitArray):
        yield _Part(own[first:last], [chunk.host], 0)
        return
    split = chunk.array.split
    if split.axis:
        before = (slice(None),) * split.axis
        slices = [chunk.host[(*before, slice(start, stop))] for _, start, stop in split.ranges(rank, num_ranks)]
        missing = own.shape[split.axis] - sum(part.shape[split.axis] for part in slices)
        if missing:
            shape = chunk.host.shape
            padding = (*shape[: split.axis], missing, *shape[split.axis + 1 :])
            slices.append(np.zeros(padding, chunk.host.dtype))
        yield _Part(own[first:last], slices, split.axis)
        return
    for at, start, stop in split.ranges(rank, num_ranks):
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            yield _Part(own[at + begin - start : at + end - start], [chunk.host[begin - first : end - first]], 0)

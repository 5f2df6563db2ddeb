"""Loads a group's arrays: each piece of a whole is read once, and every rank takes its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from model.ops.group.arrays import GroupArray, SplitArray, whole_shape
from model.ops.group.turns import in_turn
from model.ops.interface import PartOps
from model.ops.load_parallel import MAX_THREADS, Piece, load_pieces
from model.ops.weight import Array

PIECE_BYTES = 8 << 20
"""Twice the piece size of one device, because each piece is copied once per rank."""

MAX_BUSES = 2
"""Ranks whose buses are kept busy at once, by MAX_THREADS threads each."""

Read = Callable[[int, int, np.ndarray], None]


@dataclass(frozen=True)
class Rows:
    """A rank's part of a piece: `num_rows` runs of `width` elements, `step` apart in the piece and `into_step` in the
    part."""

    first: int  # in the piece
    into: int  # in the part
    width: int
    num_rows: int = 1
    step: int = 0
    into_step: int = 0


class PieceWriter(Protocol):
    """Copies pieces to the ranks; used by one thread."""

    def buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return a buffer [size] for the next piece."""

    def copy(self, rank: int, part: Array, rows: Rows) -> None:
        """Copy `rows` of the piece to a rank's `part`."""

    def end_piece(self) -> None: ...

    def close(self) -> None:
        """Wait for all copies."""


class HostWriter:
    """`PieceWriter` for ranks in this process's memory."""

    def buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        self._piece = np.empty(size, dtype)
        return self._piece

    def copy(self, rank: int, part: Array, rows: Rows) -> None:
        shape, item = (rows.num_rows, rows.width), part.dtype.itemsize
        source = as_strided(self._piece[rows.first :], shape, (rows.step * item, item))
        as_strided(part.reshape(-1)[rows.into :], shape, (rows.into_step * item, item))[...] = source

    def end_piece(self) -> None: ...

    def close(self) -> None: ...


def load_group(
    ranks: Sequence[PartOps], targets: Sequence[GroupArray], read: Read, open_writer: Callable[[], PieceWriter]
) -> None:
    """Fill `targets` as `Device.load_parallel` does, with positions in the wholes. Padding gets zeros. Each thread
    opens a writer."""
    for number, rank in in_turn(ranks):
        if padded := [array.parts[number] for array in targets if _has_padding(array, number)]:
            rank.load_parallel(padded, _zero)
    pieces = [
        piece for index, array in enumerate(targets) for piece in _interleaved(list(_pieces_of(index, array)), ranks)
    ]
    load_pieces(pieces, partial(_load, targets, read, open_writer), MAX_THREADS * min(len(ranks), MAX_BUSES))


def _load(
    targets: Sequence[GroupArray], read: Read, open_writer: Callable[[], PieceWriter], pieces: Iterator[Piece]
) -> None:
    writer = open_writer()
    try:
        for piece in pieces:
            array = targets[piece.target]
            read(piece.target, piece.start, writer.buffer(piece.stop - piece.start, array.dtype))
            for rank, part in enumerate(array.parts):
                for rows in rows_of(array, rank, piece):
                    writer.copy(rank, part, rows)
            writer.end_piece()
    finally:
        writer.close()


def rows_of(array: GroupArray, rank: int, piece: Piece) -> Iterator[Rows]:
    """Yield a rank's rows of a piece, which is whole rows of the divided axis or a part of one."""
    size = piece.stop - piece.start
    if not isinstance(array, SplitArray):
        yield Rows(0, piece.start, size)
        return
    axis, shape = array.split.axis, whole_shape(array)
    inner = math.prod(shape[axis + 1 :])
    row, own_row = shape[axis] * inner, array.shape[axis] * inner
    number, begin = divmod(piece.start, row)
    for at, start, stop in array.split.ranges(rank, len(array.parts)):
        first, last = max(begin, start * inner), min(begin + size, stop * inner)
        if first < last:
            into = number * own_row + at * inner + first - start * inner
            yield Rows(first - begin, into, last - first, max(1, size // row), row, own_row)


def _interleaved(pieces: Sequence[Piece], ranks: Sequence[PartOps]) -> Iterator[Piece]:
    """Yield pieces of each rank's rows in turn, so that all buses are busy."""
    each = -(-len(pieces) // len(ranks))
    return (piece for begin in range(each) for piece in pieces[begin::each])


def _pieces_of(index: int, array: GroupArray) -> Iterator[Piece]:
    """Yield pieces of whole rows of the divided axis, or of a single row that exceeds PIECE_BYTES."""
    shape = whole_shape(array)
    size, most = math.prod(shape), max(1, PIECE_BYTES // array.dtype.itemsize)
    row = math.prod(shape[array.split.axis :]) if isinstance(array, SplitArray) else size
    border = row if row > most else most // max(1, row) * row  # no piece crosses a multiple of it
    for begin in range(0, size, max(1, border)):
        end = min(begin + border, size)
        for start in range(begin, end, most):
            yield Piece(index, start, min(start + most, end))


def _has_padding(array: GroupArray, rank: int) -> bool:
    if not isinstance(array, SplitArray):
        return False
    ranges = array.split.ranges(rank, len(array.parts))
    return sum(stop - start for _, start, stop in ranges) < array.shape[array.split.axis]


def _zero(index: int, start: int, out: np.ndarray) -> None:
    out.fill(0)

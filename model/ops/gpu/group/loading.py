"""Copies pieces of weights from pinned memory to the GPUs of a group, each over its own bus."""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import numpy as np
from cupy.cuda import runtime

from model.ops.group.loading import PIECE_BYTES, Rows
from model.ops.group.turns import in_turn
from model.ops.interface import PartOps
from model.ops.weight import Array

_NUM_BUFFERS = 2


class CudaPieceWriter:
    """`PieceWriter` that fills one pinned buffer while the other is copied. All GPUs share the pinned memory."""

    def __init__(self, ranks: Sequence[PartOps]):
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in in_turn(ranks)]
        events = [[cupy.cuda.Event(disable_timing=True) for _ in range(_NUM_BUFFERS)] for _ in in_turn(ranks)]
        self._copied = list(zip(*events, strict=True))
        self._memory: list[cupy.cuda.PinnedMemoryPointer] = []
        self._turn = 0

    def buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        index = self._turn % _NUM_BUFFERS
        if index == len(self._memory):
            self._memory.append(cupy.cuda.alloc_pinned_memory(PIECE_BYTES))
        for event in self._copied[index]:
            event.synchronize()
        return np.frombuffer(self._memory[index], dtype, size)

    def copy(self, rank: int, part: Array, rows: Rows) -> None:
        item, stream = part.dtype.itemsize, self._streams[rank].ptr
        source = self._memory[self._turn % _NUM_BUFFERS].ptr + rows.first * item
        target, width = part.data.ptr + rows.into * item, rows.width * item
        if rows.num_rows == 1:
            runtime.memcpyAsync(target, source, width, runtime.memcpyHostToDevice, stream)
            return
        pitches = rows.into_step * item, rows.step * item
        runtime.memcpy2DAsync(
            target, pitches[0], source, pitches[1], width, rows.num_rows, runtime.memcpyHostToDevice, stream
        )

    def end_piece(self) -> None:
        for event, stream in zip(self._copied[self._turn % _NUM_BUFFERS], self._streams, strict=True):
            event.record(stream)
        self._turn += 1

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._memory.clear()

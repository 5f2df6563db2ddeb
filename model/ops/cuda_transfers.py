"""Arrays between host and device on one stream, through pinned memory, so that small transfers make nobody wait.

Small ones are carried by a kernel: the copy engines may be busy with blocks of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import cupy
import numpy as np

from model.ops.filling import PIECE_BYTES, Piece, fill_in_threads
from model.ops.packing import Packing

STAGED_BYTES = 1 << 20
"""Up to this size an upload is copied to pinned memory and does not wait; a larger one waits instead."""

NUM_PIECES = 8
"""Staged transfers under way before one has to be waited for: more than a step makes."""


MAX_CARRIERS = 256
"""Blocks of threads that carry one small transfer."""

_THREADS = 256
_WORD_BYTES = 4


class _Places(NamedTuple):
    """Where rows of words go in a table."""

    address: int  # of the numbers of the table's rows, int32 in pinned memory; 0: one after the other
    num_rows: int
    stride_words: int


_TOGETHER = _Places(0, 1, 0)


class Transfers:
    """Of one stream, for one thread at a time."""

    def __init__(self, stream: cupy.cuda.Stream, launch: Callable[..., None]):
        """`launch` is `CudaOps.launch`."""
        self._stream = stream
        self._launch = launch
        self._pieces = [_Piece() for _ in range(NUM_PIECES)]
        self._next = 0

    def upload(self, host: np.ndarray, array: cupy.ndarray) -> None:
        """Fill `array`, of the shape and dtype of `host`."""
        if host.nbytes > STAGED_BYTES:
            array.data.copy_from_host_async(host.ctypes.data, array.nbytes, self._stream)
            self._stream.synchronize()  # the caller may change or free `host` now
        elif host.nbytes:
            self.upload_all([host], array.reshape(-1).view(np.uint8))

    def upload_all(self, hosts: Sequence[np.ndarray], into: cupy.ndarray | None) -> list[cupy.ndarray]:
        """See `Ops.upload_all`."""
        packing = Packing.of(hosts)
        if into is None:
            with self._stream:
                into = cupy.empty(packing.num_bytes, np.uint8)
        piece = self._take(packing.num_bytes)
        packing.fill(piece.host, hosts)
        self._carry(piece.host.ctypes.data, into.data.ptr, min(packing.num_bytes, into.nbytes))
        piece.event.record(self._stream)
        return packing.views(into, hosts)

    def upload_rows(self, host: np.ndarray, rows: np.ndarray, table: cupy.ndarray) -> None:
        """See `Ops.upload_rows`."""
        packing = Packing.of([host, rows])
        piece = self._take(packing.num_bytes)
        packing.fill(piece.host, [host, rows])
        source = piece.host.ctypes.data
        places = _Places(source + packing.offsets[1], len(rows), table.strides[0] // _WORD_BYTES)
        self._carry(source, table.data.ptr, host.nbytes, places)
        piece.event.record(self._stream)

    def fill(self, targets: Sequence[cupy.ndarray], read: Callable[[int, int, np.ndarray], None]) -> None:
        """See `Ops.fill`. Each thread reads into one piece of pinned memory while its other one is copied."""
        device = cupy.cuda.Device()
        self._stream.synchronize()  # the targets' memory may still be in use by what had it before

        def work(pieces: Iterator[Piece]) -> None:
            device.use()
            stream = cupy.cuda.Stream(non_blocking=True)
            stagings = [_Piece(PIECE_BYTES), _Piece(PIECE_BYTES)]
            try:
                for turn, piece in enumerate(pieces):
                    staging, target = stagings[turn % 2], targets[piece.target]
                    staging.event.synchronize()
                    num_bytes = (piece.stop - piece.start) * target.itemsize
                    read(piece.target, piece.start, staging.host[:num_bytes].view(target.dtype))
                    place = target.data + piece.start * target.itemsize
                    place.copy_from_host_async(staging.host.ctypes.data, num_bytes, stream)
                    staging.event.record(stream)
            finally:
                stream.synchronize()

        fill_in_threads(targets, work)
        cupy.get_default_pinned_memory_pool().free_all_blocks()

    def download_later(self, arrays: Sequence[cupy.ndarray]) -> Callable[[], list[np.ndarray]]:
        """See `Ops.download_later`."""
        hosts = [_pinned(array.shape, array.dtype) for array in arrays]
        for host, array in zip(hosts, arrays, strict=True):
            if array.nbytes > STAGED_BYTES or array.data.ptr % _WORD_BYTES:
                array.data.copy_to_host_async(host.ctypes.data, array.nbytes, self._stream)
            else:
                self._carry(array.data.ptr, host.ctypes.data, array.nbytes)
        done = self._stream.record(cupy.cuda.Event(disable_timing=True))

        def wait() -> list[np.ndarray]:
            done.synchronize()
            return hosts

        return wait

    def _carry(self, source: int, target: int, num_bytes: int, places: _Places = _TOGETHER) -> None:
        """Copy bytes from one address to another, of which one is in pinned memory; to rows of a table, if places of
        rows are given."""
        num_words = -(-num_bytes // _WORD_BYTES)
        sizes = (
            np.int32(places.num_rows),
            np.int32(num_bytes // max(1, places.num_rows)),
            np.int32(places.stride_words),
        )
        args = (np.uint64(source), np.uint64(target), np.uint64(places.address), *sizes)
        self._launch("copy_words", (min(MAX_CARRIERS, -(-num_words // _THREADS)),), args)

    def _take(self, num_bytes: int) -> _Piece:
        """The next piece of the ring, at least so large. It is filled again only when its last transfer is done."""
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % NUM_PIECES
        piece.event.synchronize()
        if num_bytes > len(piece.host):
            piece.host = _pinned((max(4096, 1 << (num_bytes - 1).bit_length()),), np.dtype(np.uint8))
        return piece


class _Piece:
    """`host` uint8[N] is pinned memory; `event` follows the transfer that last used it."""

    def __init__(self, num_bytes: int = 0):
        self.event = cupy.cuda.Event(disable_timing=True)
        self.host = _pinned((num_bytes,), np.dtype(np.uint8))


def _pinned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Host memory that the device reads and writes by itself; contents undefined."""
    count = math.prod(shape)
    memory = cupy.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
    return np.frombuffer(memory, dtype, count).reshape(shape)

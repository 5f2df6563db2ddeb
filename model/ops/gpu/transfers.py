"""Copies arrays between host and device through pinned memory; small copies do not block the host.

A kernel makes small copies, on a stream per direction, because copy engines may be busy with cache blocks. Later work
waits only for a copy within the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from model.ops.load_parallel import PIECE_BYTES, Piece, load_in_threads
from model.ops.packing import Packing, TableRows

STAGED_BYTES = 1 << 20
"""Largest upload that is staged, without a wait."""

USUAL_BYTES = 64 << 10
"""Initial buffer size; growing a buffer delays transfers in flight."""

NUM_PIECES = 8
"""Buffers per direction, more than a step's transfers."""


MAX_CARRIERS = 256
"""Most thread blocks of a small transfer."""

_FIRST = -5
"""Highest stream priority."""

_THREADS = 256
_WORD_BYTES = 4


class _Places(NamedTuple):
    address: int  # address of int32 row numbers; 0: contiguous
    num_rows: int
    stride_words: int


_TOGETHER = _Places(0, 1, 0)


class Transfers:
    """Transfers for one stream, used by one thread at a time."""

    def __init__(self, stream: cupy.cuda.Stream, launch: Callable[..., None]):
        """`launch` is `CudaDevice.launch`."""
        self._stream = stream
        self._launch = launch
        self._up, self._down = (cupy.cuda.Stream(non_blocking=True, priority=_FIRST) for _ in range(2))
        self._arriving, self._leaving = _Ring(self._up), _Ring(self._down)

    def upload(self, host: np.ndarray, array: cupy.ndarray) -> None:
        """Fill `array`, which has the shape and dtype of `host`."""
        if host.nbytes > STAGED_BYTES:
            array.data.copy_from_host_async(host.ctypes.data, array.nbytes, self._stream)
            self._stream.synchronize()  # the caller may free `host`
        elif host.nbytes:
            self.upload_all([host], array.reshape(-1).view(np.uint8))

    def upload_all(
        self, hosts: Sequence[np.ndarray], into: cupy.ndarray | None, rows: TableRows | None = None
    ) -> list[cupy.ndarray]:
        packing = Packing.of(hosts)
        sent = hosts if rows is None else [*hosts, rows.host, rows.places]
        way = packing if rows is None else Packing.of(sent)
        if into is None:
            with self._stream:
                into = cupy.empty(packing.num_bytes, np.uint8)
        piece = self._arriving.take(way.num_bytes)
        way.fill(piece.host, sent)
        self._bring(piece, way.num_bytes)
        source = piece.device.data.ptr
        self._carry(source, into.data.ptr, min(packing.num_bytes, into.nbytes))
        if rows is not None:
            *_, at_rows, at_places = (source + offset for offset in way.offsets)
            places = _Places(at_places, len(rows.places), rows.table.strides[0] // _WORD_BYTES)
            self._carry(at_rows, rows.table.data.ptr, rows.host.nbytes, places)
        piece.event.record(self._stream)
        return packing.views(into, hosts)

    def load_parallel(self, targets: Sequence[cupy.ndarray], read: Callable[[int, int, np.ndarray], None]) -> None:
        """Implement `Device.load_parallel`. Each thread reads into one pinned buffer while its other buffer is copied.

        Buffers are pinned on demand, 0.4 ms per MiB, by one thread at a time, and kept until `release_staging`. A
        thread waits for the interpreter lock after each call that releases it, so a piece makes few.
        """
        device = cupy.cuda.Device()
        self._stream.synchronize()  # the targets' memory may be in use
        places = [(target.data.ptr, target.dtype) for target in targets]

        def work(pieces: Iterator[Piece]) -> None:
            device.use()
            stagings: list[_LoadStaging] = []
            try:
                for turn, piece in enumerate(pieces):
                    if turn < 2:
                        stagings.append(_LoadStaging())
                    staging, (address, dtype) = stagings[turn % 2], places[piece.target]
                    staging.stream.synchronize()
                    num_bytes = (piece.stop - piece.start) * dtype.itemsize
                    read(piece.target, piece.start, staging.host[:num_bytes].view(dtype))
                    staging.copy_to(address + piece.start * dtype.itemsize, num_bytes)
            finally:
                for staging in stagings:
                    staging.stream.synchronize()

        load_in_threads(targets, work)

    def release_staging(self) -> None:
        cupy.get_default_pinned_memory_pool().free_all_blocks()

    def download_async(self, arrays: Sequence[cupy.ndarray]) -> Callable[[], list[np.ndarray]]:
        is_small = [array.nbytes <= STAGED_BYTES and array.data.ptr % _WORD_BYTES == 0 for array in arrays]
        small = [array for array, fits in zip(arrays, is_small, strict=True) if fits]
        packing = Packing.of(small)
        packed = _pinned((packing.num_bytes,), np.dtype(np.uint8))
        views = iter(packing.views(packed, small))
        hosts = [next(views) if fits else self._leave(array) for array, fits in zip(arrays, is_small, strict=True)]
        piece = self._leaving.take(packing.num_bytes)
        for array, offset in zip(small, packing.offsets, strict=True):
            self._carry(array.data.ptr, piece.device.data.ptr + offset, array.nbytes)
        self._down.wait_event(self._stream.record(cupy.cuda.Event(disable_timing=True)))
        self._carry(piece.device.data.ptr, packed.ctypes.data, packing.num_bytes, stream=self._down)
        piece.event.record(self._down)
        done = self._down.record(cupy.cuda.Event(disable_timing=True))

        def wait() -> list[np.ndarray]:
            done.synchronize()
            return hosts

        return wait

    def _leave(self, array: cupy.ndarray) -> np.ndarray:
        host = _pinned(array.shape, array.dtype)
        array.data.copy_to_host_async(host.ctypes.data, array.nbytes, self._stream)
        return host

    def _bring(self, piece: _Buffer, num_bytes: int) -> None:
        self._carry(piece.host.ctypes.data, piece.device.data.ptr, num_bytes, stream=self._up)
        piece.arrival.record(self._up)
        self._stream.wait_event(piece.arrival)

    def _carry(
        self,
        source: int,
        target: int,
        num_bytes: int,
        places: _Places = _TOGETHER,
        *,
        stream: cupy.cuda.Stream | None = None,
    ) -> None:
        """Copy bytes between addresses, into table rows if `places` has an address."""
        num_words = -(-num_bytes // _WORD_BYTES)
        sizes = (
            np.int32(places.num_rows),
            np.int32(num_bytes // max(1, places.num_rows)),
            np.int32(places.stride_words),
        )
        args = (np.uint64(source), np.uint64(target), np.uint64(places.address), *sizes)
        self._launch("copy_words", (min(MAX_CARRIERS, -(-num_words // _THREADS)),), args, stream=stream)


class _Ring:
    def __init__(self, stream: cupy.cuda.Stream):
        self._stream = stream
        self._buffers = [self._buffer(USUAL_BYTES) for _ in range(NUM_PIECES)]
        self._next = 0

    def take(self, num_bytes: int) -> _Buffer:
        """Return the next buffer, of at least `num_bytes`, once its last transfer has ended."""
        index, self._next = self._next, (self._next + 1) % NUM_PIECES
        self._buffers[index].event.synchronize()
        if num_bytes > len(self._buffers[index].host):
            self._buffers[index] = self._buffer(1 << (num_bytes - 1).bit_length())
        return self._buffers[index]

    def _buffer(self, num_bytes: int) -> _Buffer:
        with self._stream:
            return _Buffer(_Staging(num_bytes), cupy.empty(num_bytes, np.uint8))


class _Staging:
    """Pinned memory; `event` follows its last transfer."""

    def __init__(self, num_bytes: int):
        self.event = cupy.cuda.Event(disable_timing=True)
        self.host = _pinned((num_bytes,), np.dtype(np.uint8))


class _LoadStaging:
    """Pinned memory for a piece, copied on its own stream."""

    def __init__(self) -> None:
        self.host = _pinned((PIECE_BYTES,), np.dtype(np.uint8))
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._address = self.host.ctypes.data

    def copy_to(self, address: int, num_bytes: int) -> None:
        runtime.memcpyAsync(address, self._address, num_bytes, runtime.memcpyHostToDevice, self.stream.ptr)


class _Buffer:
    """Pinned memory and its device copy; `arrival` follows the bus copy, `event` the transfer."""

    def __init__(self, staging: _Staging, device: cupy.ndarray):
        self.host = staging.host
        self.event = staging.event
        self.arrival = cupy.cuda.Event(disable_timing=True)
        self.device = device


def _pinned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = math.prod(shape)
    memory = cupy.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
    return np.frombuffer(memory, dtype, count).reshape(shape)

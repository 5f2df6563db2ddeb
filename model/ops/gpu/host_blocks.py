"""Cache blocks in pinned host memory: one copy per block, one stream per direction.

Pinning gigabytes takes seconds, so a thread pins pieces, touched first so that the driver's lock is held briefly.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Sequence

import cupy
import numpy as np
from cuda.bindings import runtime as cudart
from cupy.cuda import runtime

_log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Bytes registered at once. No block crosses pieces, because no copy may."""


class CudaTransfer:
    def __init__(self, begin: cupy.cuda.Event, end: cupy.cuda.Event):
        self._begin = begin
        self._end = end

    def is_done(self) -> bool:
        return bool(self._end.done)

    def wait(self) -> None:
        self._end.synchronize()

    def seconds(self) -> float:
        return float(cupy.cuda.get_elapsed_time(self._begin, self._end)) / 1e3


class CudaHostBlocks:
    """`HostBlocks` for work on `stream`, for one thread."""

    def __init__(self, kv: cupy.ndarray, num_blocks: int, stream: cupy.cuda.Stream):
        self.num_ready = 0
        self._kv = kv
        self._block_bytes = kv.nbytes // len(kv)
        self._compute = stream
        self._out = cupy.cuda.Stream(non_blocking=True)
        self._in = cupy.cuda.Stream(non_blocking=True)
        num_bytes = max(1, num_blocks * self._block_bytes)
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._address = self._bytes.ctypes.data
        self._pinned: list[int] = []
        self._release = weakref.finalize(self, _release, self._pinned, self._memory, self._out, self._in)
        self._release.atexit = False  # process exit frees it
        self._is_closing = False
        self.failure: Exception | None = None
        self._pinning = threading.Thread(target=self._pin, args=(num_blocks,), name="pinning", daemon=True)
        self._pinning.start()

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> CudaTransfer:
        return self._copy(self._out, host_blocks, self._address, blocks, self._kv.data.ptr)

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> CudaTransfer:
        return self._copy(self._in, blocks, self._kv.data.ptr, host_blocks, self._address)

    def close(self) -> None:
        self._is_closing = True
        self._pinning.join()
        self.num_ready = 0
        self._release()

    def _copy(
        self, stream: cupy.cuda.Stream, targets: Sequence[int], to: int, sources: Sequence[int], origin: int
    ) -> CudaTransfer:
        size = self._block_bytes
        stream.wait_event(self._compute.record(cupy.cuda.Event(disable_timing=True)))
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        for target, source in zip(targets, sources, strict=True):
            runtime.memcpyAsync(to + target * size, origin + source * size, size, runtime.memcpyDefault, stream.ptr)
        end.record(stream)
        return CudaTransfer(begin, end)

    def _pin(self, num_blocks: int) -> None:
        piece_blocks = max(1, PIECE_BYTES // self._block_bytes)
        try:
            self._kv.device.use()
            for first in range(0, num_blocks, piece_blocks):
                last = min(first + piece_blocks, num_blocks)
                piece = self._bytes[first * self._block_bytes : last * self._block_bytes]
                piece.fill(0)
                if self._is_closing:
                    return
                _check(cudart.cudaHostRegister(piece.ctypes.data, piece.nbytes, cudart.cudaHostRegisterPortable))
                self._pinned.append(piece.ctypes.data)
                self.num_ready = last
        except Exception as error:
            self.failure = error
            _log.warning("only %d of %d blocks of the host could be pinned: %s", self.num_ready, num_blocks, error)


def _release(pinned: list[int], memory: mmap.mmap, *streams: cupy.cuda.Stream) -> None:
    """Unregister before unmapping, since the addresses may be mapped again."""
    for stream in streams:
        stream.synchronize()
    while pinned:
        _check(cudart.cudaHostUnregister(pinned.pop()))


def _check(result: tuple[cudart.cudaError_t]) -> None:
    if result[0] != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f"host memory cannot be pinned or released: {result[0].name}")

"""Copies host values to the device while others compute: one thread stages them in pinned memory for its own stream."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import cupy
import numpy as np
from cupy.cuda import runtime

from model.ops.interface import Array

STAGING_BYTES = 4 << 20
"""Bytes of each of two pinned buffers: one is filled while the other is copied."""

_ALIGNMENT_BYTES = 16


class AsyncWriter:
    """Writes in order, after the work of `stream` submitted before each."""

    def __init__(self, stream: cupy.cuda.Stream):
        self._compute = stream
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._device = cupy.cuda.Device()
        self._stagings = [_Staging(), _Staging()]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device writes")

    def start(self, values: Iterable[tuple[Array, Array]]) -> CudaWrite:
        """Implement `AdapterOps.write_async`."""
        after = self._compute.record(cupy.cuda.Event(disable_timing=True))
        return CudaWrite(self._thread.submit(self._copy_all, after, values))

    def _copy_all(self, after: cupy.cuda.Event, values: Iterable[tuple[Array, Array]]) -> None:
        self._device.use()
        self._stream.wait_event(after)
        try:
            staging, other = self._stagings
            for array, host in values:
                source = host.reshape(-1).view(np.uint8)
                at = 0
                while at < len(source):
                    if staging.is_full:
                        staging.event.record(self._stream)
                        staging, other = other, staging
                        staging.reuse()
                    at += staging.copy(source[at:], array.data.ptr + at, self._stream)
        finally:
            self._stream.synchronize()
            for each in self._stagings:
                each.reuse()


class CudaWrite:
    """`AsyncWrite`."""

    def __init__(self, copied: Future[None]):
        self._copied = copied

    def is_done(self) -> bool:
        if not self._copied.done():
            return False
        self._copied.result()
        return True

    def wait(self) -> None:
        self._copied.result()


class _Staging:
    """Pinned memory, filled from its start; `event` follows its last copy."""

    def __init__(self) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        self._memory = cupy.cuda.alloc_pinned_memory(STAGING_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8, STAGING_BYTES)
        self._num_used = 0

    @property
    def is_full(self) -> bool:
        return self._num_used >= STAGING_BYTES

    def reuse(self) -> None:
        """Wait for its copies and start anew."""
        self.event.synchronize()
        self._num_used = 0

    def copy(self, source: np.ndarray, address: int, stream: cupy.cuda.Stream) -> int:
        """Start to copy the first bytes of `source` uint8[n] that fit; return their number."""
        count = min(len(source), STAGING_BYTES - self._num_used)
        piece = self._bytes[self._num_used : self._num_used + count]
        np.copyto(piece, source[:count])
        runtime.memcpyAsync(address, piece.ctypes.data, count, runtime.memcpyHostToDevice, stream.ptr)
        self._num_used += -(-count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return count

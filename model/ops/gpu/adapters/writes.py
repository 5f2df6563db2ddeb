"""Copies host values to the device while others compute: one thread stages them in pinned memory for its own stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import cupy
import numpy as np

from model.ops.interface import Array

STAGING_BYTES = 4 << 20
"""Bytes of each of two pinned buffers: one is filled while the other is copied."""

_ALIGNMENT_BYTES = 16
_MAX_GAP_BYTES = 64
"""Bytes between adjacent arrays, which are staged at once."""


class WriteError(RuntimeError):
    """The driver refused a copy."""


def device_copy() -> Callable[[int, int, int, int], None]:
    """Return a function that starts a copy: (device address, pinned address, bytes, stream).

    It keeps the interpreter lock: releasing it for each of some 700 copies of an adapter makes the engine's thread and
    this one wait for each other each time.
    """
    copy = ctypes.PyDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    copy.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def start(to: int, source: int, num_bytes: int, stream: int) -> None:
        error = copy(to, source, num_bytes, stream)
        if error:
            raise WriteError(f"cuMemcpyHtoDAsync: CUDA error {error}")

    return start


class AsyncWriter:
    """Writes in order, after the work of `stream` submitted before each."""

    def __init__(self, stream: cupy.cuda.Stream):
        self._compute = stream
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._device = cupy.cuda.Device()
        copy = device_copy()
        self._stagings = [_Staging(copy), _Staging(copy)]
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
            for run in _runs(values):
                while run.is_left:
                    if staging.is_full:
                        staging.event.record(self._stream)
                        staging, other = other, staging
                        staging.reuse()
                    staging.copy(run, self._stream)
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


class _Run:
    """Arrays that are adjacent in host memory, copied from the first on."""

    def __init__(self, array: Array, values: np.ndarray):
        """`values` is uint8[n]."""
        self.memory = values
        self.num_copied = 0
        self._base = values.base if _is_bytes(values.base) else None
        self._begin = 0 if self._base is None else _address(values) - _address(self._base)
        self._targets = [(0, len(values), array.data.ptr)]

    @property
    def is_left(self) -> bool:
        return self.num_copied < len(self.memory)

    def joins(self, array: Array, values: np.ndarray) -> bool:
        """Add an array, if it follows the others in memory."""
        if self._base is None or values.base is not self._base or len(self.memory) >= STAGING_BYTES:
            return False
        begin = _address(values) - _address(self._base) - self._begin
        if not 0 <= begin - len(self.memory) < _MAX_GAP_BYTES:
            return False
        self.memory = self._base[self._begin : self._begin + begin + len(values)]
        self._targets.append((begin, begin + len(values), array.data.ptr))
        return True

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, device address) of the arrays' bytes from `begin` to `end`."""
        for first, last, address in self._targets:
            if first < end and begin < last:
                yield max(begin, first), min(end, last), address + max(begin, first) - first


class _Staging:
    """Pinned memory, filled from its start; `event` follows its last copy."""

    def __init__(self, copy: Callable[[int, int, int, int], None]) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        self._copy = copy
        self._memory = cupy.cuda.alloc_pinned_memory(STAGING_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8, STAGING_BYTES)
        self._address = _address(self._bytes)
        self._num_used = 0

    @property
    def is_full(self) -> bool:
        return self._num_used >= STAGING_BYTES

    def reuse(self) -> None:
        """Wait for its copies and start anew."""
        self.event.synchronize()
        self._num_used = 0

    def copy(self, run: _Run, stream: cupy.cuda.Stream) -> None:
        """Start to copy as much of what is left of the run as fits."""
        at = run.num_copied
        end = min(len(run.memory), at + STAGING_BYTES - self._num_used)
        np.copyto(self._bytes[self._num_used : self._num_used + end - at], run.memory[at:end])
        first = self._address + self._num_used - at
        for begin, stop, address in run.pieces(at, end):
            self._copy(address, first + begin, stop - begin, stream.ptr)
        self._num_used += -(-(end - at) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        run.num_copied = end


def _runs(values: Iterable[tuple[Array, Array]]) -> Iterator[_Run]:
    run: _Run | None = None
    for array, host in values:
        source = host.reshape(-1).view(np.uint8)
        if not len(source) or (run is not None and run.joins(array, source)):
            continue
        if run is not None:
            yield run
        run = _Run(array, source)
    if run is not None:
        yield run


def _is_bytes(array: object) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 1


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

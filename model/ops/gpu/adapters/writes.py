"""Copies host values to the device during computation, on a separate thread and stream.

Values outside pinned memory are staged in it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import cupy
import numpy as np

from model.ops.interface import Array

STAGING_BYTES = 4 << 20
"""Bytes of each of two pinned buffers: one is filled while the other is copied."""

PIN_BYTES = 4 << 20
_PIN_PAUSE_S = 0.005

MAX_PLANS = 4
"""Most plans kept. Each may keep some 20 MB of zeros in pinned memory, for modules that its adapters leave out."""

_ALIGNMENT_BYTES = 16
_MAX_GAP_BYTES = 64
"""Arrays with smaller gaps between them are staged at once."""


class WriteError(RuntimeError):
    """The driver refused a copy."""


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("locations", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_IN_STREAM_ORDER = 1
_BESIDE_KERNELS = 1

StartCopies = Callable[[np.ndarray, np.ndarray, np.ndarray, int], None]
"""Starts copies, given (device addresses, pinned addresses, bytes, stream); each array is uint64[n]."""


def device_copies() -> StartCopies:
    """Return a function that starts many copies in one call without the interpreter lock. Starting the some 600 copies
    of an adapter one by one would make the engine's thread wait."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    pointers = [ctypes.c_void_p] * 3
    copy.argtypes = (*pointers, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    attributes = _CopyAttributes(order=_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)
    first = ctypes.c_size_t(0)

    def start(to: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        columns = map(_address, (to, sources, sizes))
        error = copy(*columns, len(to), ctypes.byref(attributes), ctypes.byref(first), 1, stream)
        if error:
            raise WriteError(f"cuMemcpyBatchAsync: CUDA error {error}")

    return start


def _unpin(addresses: Iterable[int]) -> None:
    for address in addresses:
        cupy.cuda.runtime.hostUnregister(address)


class AsyncWriter:
    """Writes to the device, in order."""

    def __init__(self, stream: cupy.cuda.Stream):
        self._compute = stream
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._device = cupy.cuda.Device()
        self._start = start = device_copies()
        self._direct = _Copies(start)
        self._stagings = [_Staging(start), _Staging(start)]
        self._plans: dict[str, _SlotPlan] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device writes")

    def start(self, values: Iterable[tuple[Array, Array]], *, is_unused: bool = False) -> CudaWrite:
        """Implement `AdapterOps.write_async`."""
        return CudaWrite(self._thread.submit(self._copy_all, self._submitted(is_unused), values))

    def start_slot(
        self,
        values_of: Callable[[int], Iterable[tuple[Array, Array]]],
        slot: int,
        last_slot: int,
        memory: tuple[str, np.ndarray],
        *,
        is_unused: bool = False,
    ) -> CudaWrite:
        """Implement `AdapterOps.write_slot_async`."""
        after = self._submitted(is_unused)
        return CudaWrite(self._thread.submit(self._copy_slot, after, values_of, slot, last_slot, memory))

    def _submitted(self, is_unused: bool) -> cupy.cuda.Event | None:
        return None if is_unused else self._compute.record(cupy.cuda.Event(disable_timing=True))

    def _copy_slot(
        self,
        after: cupy.cuda.Event | None,
        values_of: Callable[[int], Iterable[tuple[Array, Array]]],
        slot: int,
        last_slot: int,
        memory: tuple[str, np.ndarray],
    ) -> None:
        self._device.use()
        key, values = memory
        if not _is_pinned(values):
            self._copy_all(after, values_of(slot))
            return
        plan = self._plans.get(key)
        if plan is None:
            plan = _SlotPlan(values_of, last_slot, values)
            self._plans[key] = plan
            if len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        if after is not None:
            self._stream.wait_event(after)
        try:
            plan.start(slot, _address(values), self._start, self._stream)
        finally:
            self._stream.synchronize()

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        """Implement `AdapterOps.pin`. Pieces of PIN_BYTES are pinned from first to last, because launches wait for each
        piece."""
        self._device.use()
        runtime, first = cupy.cuda.runtime, _address(memory)
        addresses = range(first, first + memory.nbytes, PIN_BYTES)
        for address in addresses:
            num_bytes = min(PIN_BYTES, first + memory.nbytes - address)
            runtime.hostRegister(address, num_bytes, runtime.hostAllocPortable)
            time.sleep(_PIN_PAUSE_S)
        return partial(_unpin, addresses)

    def _copy_all(self, after: cupy.cuda.Event | None, values: Iterable[tuple[Array, Array]]) -> None:
        self._device.use()
        if after is not None:
            self._stream.wait_event(after)
        try:
            pinned: dict[int, tuple[bool, _Run]] = {}  # by first byte; a run keeps the memory until it is copied
            staging, other = self._stagings
            for run in _runs(values):
                if run.base_address not in pinned:
                    pinned[run.base_address] = run.is_pinned, run
                if pinned[run.base_address][0]:
                    self._direct.add(run.pinned_pieces(), run.address)
                    if self._direct.num_bytes >= STAGING_BYTES:
                        self._direct.start(self._stream)
                    continue
                while run.is_left:
                    if staging.is_full:
                        staging.start(self._stream)
                        staging, other = other, staging
                        staging.reuse()
                    staging.fill(run)
            staging.start(self._stream)
            self._direct.start(self._stream)
        finally:
            self._stream.synchronize()
            for each in self._stagings:
                each.reuse()


class CudaWrite:
    """`AsyncWrite` of an AsyncWriter."""

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
        self.base_address = 0 if self._base is None else _address(self._base)
        self.address = _address(values)
        self._begin = 0 if self._base is None else self.address - self.base_address
        self._targets = [(0, len(values), array.data.ptr)]

    @property
    def is_left(self) -> bool:
        return self.num_copied < len(self.memory)

    def joins(self, array: Array, values: np.ndarray) -> bool:
        """Add an array if it follows the others in memory; return whether it does."""
        if self._base is None or values.base is not self._base or len(self.memory) >= STAGING_BYTES:
            return False
        begin = _address(values) - self.address
        if not 0 <= begin - len(self.memory) < _MAX_GAP_BYTES:
            return False
        self.memory = self._base[self._begin : self._begin + begin + len(values)]
        self._targets.append((begin, begin + len(values), array.data.ptr))
        return True

    @property
    def is_pinned(self) -> bool:
        """True if the memory around the arrays is pinned."""
        return self._base is not None and _is_pinned(self._base)

    def pinned_pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield all `pieces`, cut at multiples of PIN_BYTES in the surrounding memory."""
        for begin, end, address in self.pieces(0, len(self.memory)):
            for at, stop in _within_pins(self._begin + begin, self._begin + end):
                yield at - self._begin, stop - self._begin, address + at - self._begin - begin

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, device address) of the arrays' bytes from `begin` to `end`."""
        for first, last, address in self._targets:
            if first < end and begin < last:
                yield max(begin, first), min(end, last), address + max(begin, first) - first


class _SlotPlan:
    """Copies of all values of a slot, for adapters whose memories have one layout. Finding them for each adapter would
    keep the interpreter from the engine for milliseconds."""

    def __init__(self, values_of: Callable[[int], Iterable[tuple[Array, Array]]], last_slot: int, memory: np.ndarray):
        """`memory` is uint8[n]. Values outside it are kept in pinned memory."""
        first, size = _address(memory), len(memory)
        rows: list[tuple[int, int, int]] = []  # device address in slot 0 and in the last, bytes
        sources: list[tuple[bool, int]] = []  # whether it lies in the memory; its offset there or in the constants
        constants = []
        num_constant_bytes = 0
        for (to, host), (to_last, _) in zip(values_of(0), values_of(last_slot), strict=True):
            source = host.reshape(-1).view(np.uint8)
            if not len(source):
                continue
            begin = _address(source) - first
            is_inside = 0 <= begin < size
            if not is_inside:
                constants.append(source)
                begin = num_constant_bytes
                num_constant_bytes += len(source)
            end = begin + len(source)
            for at, stop in _within_pins(begin, end) if is_inside else ((begin, end),):
                rows.append((to.data.ptr + at - begin, to_last.data.ptr + at - begin, stop - at))
                sources.append((is_inside, at))
        self._to, to_last, self._sizes = np.array(rows, np.uint64).T.copy()
        self._strides = (to_last - self._to) // np.uint64(max(1, last_slot))
        self._is_inside, self._offsets = np.array(sources, np.uint64).T.copy()
        self._constants = cupy.cuda.alloc_pinned_memory(max(1, num_constant_bytes))
        if constants:
            kept = np.frombuffer(self._constants, np.uint8, num_constant_bytes)
            np.concatenate(constants, out=kept)
            self._offsets += (1 - self._is_inside) * np.uint64(_address(kept))

    def start(self, slot: int, address: int, start: StartCopies, stream: cupy.cuda.Stream) -> None:
        """Start the copies from the memory at `address` to the slot."""
        to = self._to + self._strides * np.uint64(slot)
        start(to, self._offsets + self._is_inside * np.uint64(address), self._sizes, stream.ptr)


class _Copies:
    """Copies that are started together."""

    def __init__(self, start: StartCopies):
        self._start = start
        self._columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        self.num_bytes = 0

    def add(self, pieces: Iterable[tuple[int, int, int]], address: int) -> None:
        """Add pieces (begin, end, device address) of the pinned memory at `address`."""
        to, sources, sizes = self._columns
        for begin, end, target in pieces:
            to.append(target)
            sources.append(address + begin)
            sizes.append(end - begin)
            self.num_bytes += end - begin

    def start(self, stream: cupy.cuda.Stream) -> None:
        columns, self._columns, self.num_bytes = self._columns, ([], [], []), 0
        if columns[0]:
            to, sources, sizes = np.array(columns, np.uint64)
            self._start(to, sources, sizes, stream.ptr)


class _Staging:
    """Pinned memory, filled from its start; `_event` follows its last copy."""

    def __init__(self, start: StartCopies) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self._copies = _Copies(start)
        self._memory = cupy.cuda.alloc_pinned_memory(STAGING_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8, STAGING_BYTES)
        self._address = _address(self._bytes)
        self._num_used = 0

    @property
    def is_full(self) -> bool:
        return self._num_used >= STAGING_BYTES

    def reuse(self) -> None:
        self._event.synchronize()
        self._num_used = 0

    def fill(self, run: _Run) -> None:
        """Stage as much of the rest of the run as fits."""
        at = run.num_copied
        end = min(len(run.memory), at + STAGING_BYTES - self._num_used)
        np.copyto(self._bytes[self._num_used : self._num_used + end - at], run.memory[at:end])
        self._copies.add(run.pieces(at, end), self._address + self._num_used - at)
        self._num_used += -(-(end - at) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        run.num_copied = end

    def start(self, stream: cupy.cuda.Stream) -> None:
        self._copies.start(stream)
        self._event.record(stream)


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


def _within_pins(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Split a range of a memory at multiples of PIN_BYTES."""
    while begin < end:
        stop = min(end, PIN_BYTES * (begin // PIN_BYTES + 1))
        yield begin, stop
        begin = stop


def _is_pinned(memory: np.ndarray) -> bool:
    """Return whether all of a memory is pinned, by its last byte, which is pinned last."""
    runtime = cupy.cuda.runtime
    attributes = runtime.pointerGetAttributes(_address(memory) + len(memory) - 1)
    return bool(attributes.type == runtime.memoryTypeHost)


def _is_bytes(array: object) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 1


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

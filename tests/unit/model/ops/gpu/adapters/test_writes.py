"""Writes through two pinned buffers, on a device whose copies happen as late as they may. No GPU is needed."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

writes = pytest.importorskip("model.ops.gpu.adapters.writes", reason="needs CuPy", exc_type=ImportError)
STAGING_BYTES, PIN_BYTES = 64, 48


class LateStream:
    """Copies take effect when a caller waits for the stream, or for an event after them."""

    def __init__(self, **_):
        self.ptr, self.waiting, self.waited_for = self, [], []

    def record(self, event):
        return event

    def wait_event(self, event):
        self.waited_for.append(event)

    def synchronize(self, count=None):
        done, self.waiting = self.waiting[:count], self.waiting[len(self.waiting[:count]) :]
        for address, source, num_bytes in done:
            ctypes.memmove(address, source, num_bytes)


class LateEvent:
    def __init__(self, **_):
        self.stream, self.last = None, None

    def record(self, stream):
        self.stream, self.last = stream, stream.waiting[-1] if stream.waiting else None

    def synchronize(self):
        if self.last is not None and self.last in self.stream.waiting:
            self.stream.synchronize(self.stream.waiting.index(self.last) + 1)


def start_late(to, sources, sizes, stream):
    stream.waiting += zip(to.tolist(), sources.tolist(), sizes.tolist(), strict=True)


class FakeRuntime:
    memoryTypeHost, hostAllocPortable = 1, 1

    def __init__(self):
        self.pinned = {}

    def hostRegister(self, address, num_bytes, flags):
        self.pinned[address] = num_bytes

    def hostUnregister(self, address):
        del self.pinned[address]

    def pointerGetAttributes(self, address):
        is_pinned = any(first <= address < first + size for first, size in self.pinned.items())
        return SimpleNamespace(type=int(is_pinned))


@pytest.fixture
def writer(monkeypatch):
    cuda = SimpleNamespace(
        Stream=LateStream,
        Event=LateEvent,
        Device=lambda: SimpleNamespace(use=lambda: None),
        alloc_pinned_memory=bytearray,
        runtime=FakeRuntime(),
    )
    monkeypatch.setattr(writes, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(writes, "device_copies", lambda: start_late)
    monkeypatch.setattr(writes, "STAGING_BYTES", STAGING_BYTES)
    monkeypatch.setattr(writes, "PIN_BYTES", PIN_BYTES)
    return writes.AsyncWriter(LateStream())


def on_device(memory: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(data=SimpleNamespace(ptr=memory.ctypes.data))


def test_values_of_any_size_arrive(writer):
    rng = np.random.default_rng(0)
    hosts = [rng.integers(0, 99, size).astype(np.int16) for size in (1, 7, 200, 32, 31, 33, 3)]
    memories = [np.zeros_like(host) for host in hosts]
    for _ in range(2):  # buffers are used again
        write = writer.start(zip(map(on_device, memories), hosts, strict=True))
        write.wait()
        assert write.is_done()
        for memory, host in zip(memories, hosts, strict=True):
            np.testing.assert_array_equal(memory, host)
            memory[:] = 0


def test_arrays_that_follow_one_another_are_staged_at_once(writer, monkeypatch):
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 99, 600).astype(np.uint8)
    ends = [0, 3, 40, 41, 57, 57, 230, 300, 364]
    hosts = [whole[begin:end].view(np.int8) for begin, end in pairwise(ends)]
    hosts += [whole[500:520], whole[390:400], whole[400:500:2].copy()]  # too far, before, elsewhere
    memories = [np.zeros_like(host) for host in hosts]
    staged, copyto = [], np.copyto
    monkeypatch.setattr(np, "copyto", lambda to, source: (staged.append(len(source)), copyto(to, source)))
    writer.start(zip(map(on_device, memories), hosts, strict=True)).wait()
    for memory, host in zip(memories, hosts, strict=True):
        np.testing.assert_array_equal(memory, host)
    assert staged[:3] == [STAGING_BYTES] * 3


def test_pinned_memory_is_not_staged(writer, monkeypatch):
    whole = np.random.default_rng(2).integers(0, 99, 600).astype(np.uint8)
    unpin = writer.pin(whole)
    hosts = [whole[begin:end].view(np.int8) for begin, end in ((0, 64), (64, 300), (500, 517))]
    hosts.insert(1, np.arange(9, dtype=np.int32))  # not pinned
    memories = [np.zeros_like(host) for host in hosts]
    staged, copyto, sizes = [], np.copyto, []
    monkeypatch.setattr(np, "copyto", lambda to, source: (staged.append(len(source)), copyto(to, source)))
    monkeypatch.setattr(writer._direct, "_start", lambda *copies: (sizes.extend(copies[2]), start_late(*copies)))
    writer.start(zip(map(on_device, memories), hosts, strict=True)).wait()
    for memory, host in zip(memories, hosts, strict=True):
        np.testing.assert_array_equal(memory, host)
    assert staged == [36]
    assert max(sizes) <= PIN_BYTES
    unpin()
    assert not writes.cupy.cuda.runtime.pinned


def test_a_write_waits_for_the_work_before_it_unless_its_arrays_are_unused(writer):
    writer.start(()).wait()
    assert len(writer._stream.waited_for) == 1
    writer.start((), is_unused=True).wait()
    assert len(writer._stream.waited_for) == 1


def test_what_stops_a_write_is_raised(writer):
    def values():
        yield from ()
        raise OSError("the file is gone")

    write = writer.start(values())
    with pytest.raises(OSError, match="the file is gone"):
        write.wait()
    with pytest.raises(OSError, match="the file is gone"):
        write.is_done()


def test_slots_of_one_layout_are_written_from_pinned_memory_by_one_plan(writer):
    rng = np.random.default_rng(3)
    arrays = np.zeros((4, 100), np.uint8), np.zeros((4, 70), np.uint8), np.zeros((4, 5), np.uint8)
    memories = [rng.integers(1, 99, 200).astype(np.uint8) for _ in range(2)]

    def values_of(slot, memory):
        hosts = memory[20:120], memory[120:190], np.arange(5, dtype=np.uint8)
        return ((on_device(array[slot]), host) for array, host in zip(arrays, hosts, strict=True))

    def write(slot, memory):
        writer.start_slot(lambda slot: values_of(slot, memory), slot, 3, ("layout", memory)).wait()
        assert [array[slot].tolist() for array in arrays] == [host.tolist() for _, host in values_of(slot, memory)]

    write(1, memories[0])
    assert not writer._plans, "the memory is not pinned"
    for memory in memories:
        writer.pin(memory)
    for slot, memory in ((2, memories[1]), (0, memories[0]), (1, memories[1]), (3, memories[0]), (1, memories[0])):
        write(slot, memory)
    assert list(writer._plans) == ["layout"]

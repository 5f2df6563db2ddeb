"""Memories made ahead, pinned and used again."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

from service.engine.adapter_reading.memories import SharedMemories

NUM_BYTES = 3 * 4096


def settle(memories: SharedMemories) -> None:
    memories._maker.submit(int).result()
    memories._pinner.submit(int).result()


def test_one_is_made_ahead_and_used_again():
    memories = SharedMemories(NUM_BYTES)
    first = memories.take()
    array = memories.array(first)
    array[:] = 7
    view = array[5:]
    settle(memories)
    second = memories.take()
    assert (first, second, len(array)) == (0, 1, NUM_BYTES)
    assert os.pread(memories.descriptors[first], 2, NUM_BYTES - 2) == b"\x07\x07"
    memories.give_back(second)
    settle(memories)
    del array
    assert {memories.take(), memories.take()} == {1, 2}
    del view
    settle(memories)
    assert first in {memories.take(), memories.take()}


def test_each_is_pinned_until_it_is_unmapped():
    pinned: set[int] = set()

    def pin(memory: np.ndarray):
        assert len(memory) == NUM_BYTES
        address = memory.ctypes.data
        pinned.add(address)
        return lambda: pinned.remove(address)

    memories = SharedMemories(NUM_BYTES, pin)
    array = memories.array(memories.take())
    settle(memories)
    assert len(pinned) == 2
    assert array.ctypes.data in pinned
    del memories
    gc.collect()
    assert pinned == {array.ctypes.data}
    del array
    assert not pinned


def test_memories_are_made_while_one_is_pinned():
    may_pin = threading.Event()

    def pin(memory: np.ndarray):
        may_pin.wait()
        return lambda: None

    memories = SharedMemories(NUM_BYTES, pin)
    try:
        assert [memories.take() for _ in range(3)] == [0, 1, 2]
    finally:
        may_pin.set()


def test_without_memory_an_error_is_raised_each_time(monkeypatch):
    memories = SharedMemories(NUM_BYTES)

    def refuse(*_):
        raise OSError("no memory")

    settle(memories)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    memories.take()
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            memories.take()
    settle(memories)
    monkeypatch.undo()
    with pytest.raises(OSError, match="no memory"):
        memories.take()
    assert memories.take() == 1


def test_memory_that_cannot_be_pinned_is_used(caplog):
    def pin(memory: np.ndarray):
        raise RuntimeError("not supported")

    memories = SharedMemories(NUM_BYTES, pin)
    assert memories.take() == 0
    settle(memories)
    assert "is not pinned" in caplog.text

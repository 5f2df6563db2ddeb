"""The layout of shared memory is that of cuda/group/signals.cuh."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np

from model.ops.gpu.group import shared
from tests.support.source_tree import ROOT

SOURCE = (ROOT / "cuda" / "group" / "signals.cuh").read_text()


def constant(name: str) -> int:
    return eval(re.search(rf"\b{name} = ([^;,]+)[;,]", SOURCE)[1])


def test_the_constants_are_the_kernels():
    names = "MAX_BLOCKS", "MAX_PUSH_ROWS", "PUSH_ROW_BYTES"
    assert [constant(name) for name in names] == [getattr(shared, name) for name in names]


def test_words_and_slots_fill_the_memory():
    slots = 4 * (constant("BARRIERS") + (2 + 4) * shared.MAX_BLOCKS)
    assert shared.shared_bytes(4) == slots + 2 * 4 * shared.MAX_PUSH_ROWS * 2 * shared.PUSH_ROW_BYTES
    assert slots % 16 == 0


def test_arguments_hold_every_rank_s_address():
    arrays = [SimpleNamespace(data=SimpleNamespace(ptr=ptr)) for ptr in (16, 1 << 40)]
    assert shared.per_rank(arrays).tobytes() == np.array([16, 1 << 40], np.uint64).tobytes()
    first, second = shared.groups(arrays)
    assert first.dtype.itemsize == 24
    assert second.view(np.uint64).tolist() == [16, 1 << 40, 1]


def test_the_error_is_the_first_word():
    memory = np.zeros(shared.shared_bytes(2), np.uint8)
    memory[0] = 3
    assert shared.error_of(memory).tolist() == [3]

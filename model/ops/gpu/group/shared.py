"""Memory that a group's ranks write for each other, and the first arguments of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.ops.weight import Array

MAX_BLOCKS, MAX_PUSH_ROWS, PUSH_ROW_BYTES = 512, 16, 32 << 10
"""Constants of cuda/group/signals.cuh."""

_WORD_BYTES = 4
_BARRIERS = 32
_POINTER_BYTES = 8


def shared_bytes(num_ranks: int) -> int:
    """Return the bytes of a rank's shared memory, which starts as zeros."""
    words = _BARRIERS + (2 + num_ranks) * MAX_BLOCKS
    return words * _WORD_BYTES + 2 * num_ranks * MAX_PUSH_ROWS * 2 * PUSH_ROW_BYTES


def error_of(memory: Array) -> Array:
    """Return uint32[1] of shared memory uint8[N]: 0, or 1 + the late rank."""
    return memory[:_WORD_BYTES].view(np.uint32)


def per_rank(arrays: Sequence[Array]) -> np.ndarray:
    """Return the kernel argument `PerRank`: one array per rank."""
    return _struct([array.data.ptr for array in arrays])


def groups(memories: Sequence[Array]) -> list[np.ndarray]:
    """Return the kernel argument `Group` of each rank."""
    addresses = [memory.data.ptr for memory in memories]
    return [_struct([*addresses, rank]) for rank in range(len(memories))]


def _struct(words: Sequence[int]) -> np.ndarray:
    return np.array(words, np.uint64).view(f"V{_POINTER_BYTES * len(words)}")

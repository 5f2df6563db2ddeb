"""Groups of ranks on the CPU."""

from __future__ import annotations

import numpy as np

from model.ops.collectives import NumpyCollectives
from model.ops.cpu.ops import FLOAT32, NumpyOps
from model.ops.group.arrays import SplitArray
from model.ops.group.ops import GroupOps


def group_of(num_ranks: int, dtype: np.dtype = FLOAT32, kv_dtype: np.dtype | None = None) -> GroupOps:
    return GroupOps([NumpyOps(dtype, kv_dtype) for _ in range(num_ranks)], NumpyCollectives())


def loaded(ops: GroupOps, array: SplitArray, whole: np.ndarray) -> SplitArray:
    """Return `array`, loaded with its parts of `whole`."""
    ops.load_parallel([array], lambda _, start, out: np.copyto(out, whole.reshape(-1)[start : start + out.size]))
    return array

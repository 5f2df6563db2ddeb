"""Second tier of the cache, in memory of the same host."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from model.ops.interface import Array


class NumpyTransfer:
    def __init__(self, seconds: float):
        self._seconds = seconds

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds(self) -> float:
        return self._seconds


class NumpyHostBlocks:
    def __init__(self, kv: Array, num_blocks: int):
        self.num_ready = num_blocks
        self.failure: Exception | None = None
        self._kv = kv
        self._memory = np.empty((num_blocks, *kv.shape[1:]), kv.dtype)

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> NumpyTransfer:
        begin_s = time.perf_counter()
        self._memory[list(host_blocks)] = self._kv[list(blocks)]
        return NumpyTransfer(time.perf_counter() - begin_s)

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> NumpyTransfer:
        begin_s = time.perf_counter()
        self._kv[list(blocks)] = self._memory[list(host_blocks)]
        return NumpyTransfer(time.perf_counter() - begin_s)

    def close(self) -> None:
        self.num_ready = 0
        del self._memory

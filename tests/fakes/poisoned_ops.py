"""The GPU backend with NaN in temporaries before an op fills them: shows what a kernel leaves out."""

from __future__ import annotations

from model.ops.gpu.group.rank import CudaRank
from model.ops.gpu.ops import CudaOps

_ALL_ONES = 0xFF  # a NaN in each of the three float types, -1 in integers


class _Poisoned(CudaOps):
    is_poisoning = True  # off while a kernel is timed

    def temporary(self, shape, dtype):
        array = super().temporary(shape, dtype)
        if array.nbytes and self.is_poisoning:
            array.data.memset_async(_ALL_ONES, array.nbytes, self.stream)
        return array


class PoisonedOps(_Poisoned):
    """Poisoned backend of one GPU."""


class PoisonedRank(_Poisoned, CudaRank):
    """Poisoned rank of a group."""

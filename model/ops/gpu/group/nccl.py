"""NCCL between the GPUs of one process. It only moves bytes; our kernels sum, in rank order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cupy.cuda import nccl

from model.ops.gpu.group.rank import CudaRank
from model.ops.interface import Array


class NcclMover:
    """`ShareMover` of these ranks, on their streams."""

    def __init__(self, ranks: Sequence[CudaRank]):
        """Raise AttributeError without NCCL, or NCCL's errors."""
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast
        self._ranks = ranks
        self.links = nccl.NcclCommunicator.initAll([rank.device_id for rank in ranks])

    def exchange(self, parts: Sequence[Array], into: Sequence[Array], num_bytes: int) -> None:
        size = parts[0].nbytes
        with self._together():
            for rank, (ops, link) in enumerate(zip(self._ranks, self.links, strict=True)):
                own = max(0, min(num_bytes, size - rank * num_bytes))
                for peer in range(len(self._ranks)):
                    share = max(0, min(num_bytes, size - peer * num_bytes))
                    if peer == rank:
                        continue
                    if share:
                        at = parts[rank].data.ptr + peer * num_bytes
                        link.send(at, share, nccl.NCCL_INT8, peer, ops.stream.ptr)
                    if own:
                        link.recv(into[rank].data.ptr + peer * num_bytes, own, nccl.NCCL_INT8, peer, ops.stream.ptr)

    def gather(self, arrays: Sequence[Array], num_bytes: int) -> None:
        with self._together():
            for rank, (ops, link) in enumerate(zip(self._ranks, self.links, strict=True)):
                whole = arrays[rank].data.ptr
                link.allGather(whole + rank * num_bytes, whole, num_bytes, nccl.NCCL_INT8, ops.stream.ptr)

    @contextmanager
    def _together(self) -> Iterator[None]:
        nccl.groupStart()
        try:
            yield
        finally:
            nccl.groupEnd()

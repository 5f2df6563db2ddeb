"""Opens the GPUs of one host as a group and checks that they reach each other."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from functools import partial

import numpy as np

from model.errors import ModelError
from model.ops.gpu.group.collectives import CudaCollectives
from model.ops.gpu.group.interface import ShareMover
from model.ops.gpu.group.loading import CudaPieceWriter
from model.ops.gpu.group.ops import CudaGroupOps
from model.ops.gpu.group.paths import SumPath, uses_nccl
from model.ops.gpu.group.peers import FLAG, check_count, connect
from model.ops.gpu.group.rank import CudaRank
from model.ops.gpu.group.shared import MAX_BLOCKS
from model.ops.group.arrays import GroupArray
from model.ops.group.turns import in_turn

_CHECKED_SHAPE = (4, 256)
_BLOCKS_OF_ONE_GPU = 16
"""Blocks of a rank that shares its GPU with others, because all ranks' blocks must be resident."""

_log = logging.getLogger(__name__)


def open_cuda_group(dtype: np.dtype, kv_dtype: np.dtype | None, num_ranks: int) -> CudaGroupOps:
    """Open the first `num_ranks` visible GPUs. Raises ModelError if they are too few or different, or lack peer
    access."""
    check_count(num_ranks)
    return open_devices(dtype, kv_dtype, range(num_ranks))


def open_devices(
    dtype: np.dtype,
    kv_dtype: np.dtype | None,
    device_ids: Sequence[int],
    rank_type: type[CudaRank] = CudaRank,
    *,
    opens_nccl: bool = False,
) -> CudaGroupOps:
    """Open these GPUs, one rank each; tests may name one twice. `opens_nccl`: even if no sum uses it. Raises
    ModelError."""
    connect(device_ids)
    ranks = [rank_type(device_id, dtype, kv_dtype) for device_id in device_ids]
    shares_gpu = len(set(device_ids)) < len(device_ids)
    for rank in ranks:  # blocks that wait for a sum would hold SMs that another rank of the GPU needs
        rank.launches_early = not shares_gpu
    wants_nccl = opens_nccl or uses_nccl(len(ranks))
    mover = _open_nccl(ranks) if wants_nccl and not shares_gpu else None
    collectives = CudaCollectives(ranks, mover, _BLOCKS_OF_ONE_GPU if shares_gpu else MAX_BLOCKS)
    ops = CudaGroupOps(ranks, collectives, partial(CudaPieceWriter, ranks))
    _check_sums(ops, collectives, ranks)
    return ops


def _open_nccl(ranks: Sequence[CudaRank]) -> ShareMover | None:
    """Return NCCL's links, or None without NCCL; then two-shot sums carry everything large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if NCCL is missing
            from model.ops.gpu.group.nccl import NcclMover
        return NcclMover(ranks)
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.info("sums do without NCCL (the extra nccl installs it): %s", error)
        return None


def _check_sums(ops: CudaGroupOps, collectives: CudaCollectives, ranks: Sequence[CudaRank]) -> None:
    """Sum over the links, because drivers have granted access that did not work. Raises ModelError."""
    whole = np.arange(math.prod(_CHECKED_SHAPE), dtype=np.float32).reshape(_CHECKED_SHAPE) % 32
    parts = []
    for number, rank in in_turn(ranks):
        parts.append(rank.upload((whole + number).astype(ops.dtype)))
    expected = whole * len(ranks) + sum(range(len(ranks)))  # at most 256: exact
    try:
        for path in (SumPath.PULL, SumPath.TWO_SHOT):
            with ops.scratch():
                total = ops.download(GroupArray(tuple(collectives.sum_by(path, parts))))
            if (total.astype(np.float32) != expected).any():
                raise ModelError(f"{FLAG}: GPUs read wrong values from each other (check the host's IOMMU and ACS)")
    except RuntimeError as error:
        raise ModelError(f"{FLAG}: {error}") from error

"""Opens the GPUs of one host as a group, and checks that they reach each other."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from itertools import permutations

import cupy
import numpy as np
from cupy.cuda import runtime

from model.errors import ModelError
from model.ops.gpu.group.collectives import CudaCollectives
from model.ops.gpu.group.interface import ShareMover
from model.ops.gpu.group.ops import CudaGroupOps
from model.ops.gpu.group.paths import SumPath
from model.ops.gpu.group.rank import CudaRank
from model.ops.gpu.group.shared import MAX_BLOCKS
from model.ops.group.arrays import GroupArray

_FLAG = "--tensor-parallel-size"
_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
_CHECKED_SHAPE = (4, 256)
_BLOCKS_OF_ONE_GPU = 16
"""Blocks of a rank that shares its GPU with others: all ranks' must be resident."""

_log = logging.getLogger(__name__)


def open_cuda_group(dtype: np.dtype, kv_dtype: np.dtype | None, num_ranks: int) -> CudaGroupOps:
    """Open the first `num_ranks` visible GPUs. Raises ModelError for too few, for different ones, and without peer
    access."""
    num_visible = runtime.getDeviceCount()
    if num_ranks > num_visible:
        raise ModelError(f"{_FLAG}: {num_ranks} GPUs are needed, {num_visible} are visible")
    return open_devices(dtype, kv_dtype, range(num_ranks))


def open_devices(
    dtype: np.dtype, kv_dtype: np.dtype | None, device_ids: Sequence[int], rank_type: type[CudaRank] = CudaRank
) -> CudaGroupOps:
    """Open these GPUs, a rank each; tests may name one twice. Raises ModelError."""
    _check_equal(device_ids)
    _connect(device_ids)
    ranks = [rank_type(device_id, dtype, kv_dtype) for device_id in device_ids]
    shares_gpu = len(set(device_ids)) < len(device_ids)
    mover = None if shares_gpu else _open_nccl(ranks)
    collectives = CudaCollectives(ranks, mover, _BLOCKS_OF_ONE_GPU if shares_gpu else MAX_BLOCKS)
    ops = CudaGroupOps(ranks, collectives)
    _check_sums(ops, collectives, ranks)
    return ops


def _check_equal(device_ids: Sequence[int]) -> None:
    first = _description(device_ids[0])
    for device_id in device_ids[1:]:
        if (other := _description(device_id)) != first:
            raise ModelError(f"{_FLAG}: cuda:{device_ids[0]} is {first}, cuda:{device_id} is {other} (equal GPUs)")


def _description(device_id: int) -> str:
    properties = runtime.getDeviceProperties(device_id)
    name, num_bytes = properties["name"].decode(), properties["totalGlobalMem"]
    return f"{name} with {num_bytes / (1 << 30):.0f} GiB"


def _connect(device_ids: Sequence[int]) -> None:
    """Let each GPU read and write the memory of the others."""
    for own, peer in permutations(dict.fromkeys(device_ids), 2):
        if not runtime.deviceCanAccessPeer(own, peer):
            raise ModelError(
                f"{_FLAG}: cuda:{own} has no peer access to cuda:{peer} (GPUs that NVLink or PCIe connects)"
            )
        cupy.cuda.Device(own).use()
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as error:
            if error.status != _ALREADY_ENABLED:
                raise ModelError(f"{_FLAG}: cuda:{own} has no peer access to cuda:{peer}: {error}") from error


def _open_nccl(ranks: Sequence[CudaRank]) -> ShareMover | None:
    """Return NCCL's links; None without NCCL: then two-shot sums carry all that is large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's, where NCCL is missing
            from model.ops.gpu.group.nccl import NcclMover
        return NcclMover(ranks)
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.info("sums do without NCCL (the extra nccl installs it): %s", error)
        return None


def _check_sums(ops: CudaGroupOps, collectives: CudaCollectives, ranks: Sequence[CudaRank]) -> None:
    """Sum over the links: drivers have granted access that did not work. Raises ModelError."""
    whole = np.arange(math.prod(_CHECKED_SHAPE), dtype=np.float32).reshape(_CHECKED_SHAPE) % 32
    parts = []
    for number, rank in enumerate(ranks):
        rank.use()
        parts.append(rank.upload((whole + number).astype(ops.dtype)))
    expected = whole * len(ranks) + sum(range(len(ranks)))  # at most 256: exact
    try:
        for path in (SumPath.PULL, SumPath.TWO_SHOT):
            with ops.scratch():
                total = ops.download(GroupArray(tuple(collectives.sum_by(path, parts))))
            if (total.astype(np.float32) != expected).any():
                raise ModelError(f"{_FLAG}: GPUs read wrong values from each other (check the host's IOMMU and ACS)")
    except RuntimeError as error:
        raise ModelError(f"{_FLAG}: {error}") from error

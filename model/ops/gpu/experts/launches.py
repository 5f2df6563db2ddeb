"""Launches the kernels of routing and of sums over experts. All sizes are host integers, so steps can be captured."""

from __future__ import annotations

import math

import numpy as np

from model.ops.gpu.device import expect
from model.ops.gpu.experts.builds import MAX_EXPERTS
from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array, ExpertGroups

MAX_FEW_ROWS = 8
"""Most rows of route_few, one warp each."""

_GROUP_WARPS = 16  # WARPS of group_by_expert.cu
_ROUTED_ROWS = 8  # rows per block of route_experts.cu
_WARP = 32
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


def route_experts(
    device: KernelLauncher, logits: Array, how: tuple[int, bool], slots: Array | None, num_slots: int
) -> tuple[Array, Array]:
    """Implement `Ops.route_experts`; `how` is (num_used, renormalise)."""
    num_rows, num_experts, num_used, renormalise = _expect_routes(logits, how, slots)
    ids, weights = (device.temporary((num_rows, num_used), dtype) for dtype in (_INT32, _FLOAT32))
    sizes = map(np.int32, (num_rows, num_experts, num_used, renormalise))
    grid = (math.ceil(num_rows / _ROUTED_ROWS),)
    args = (logits, slots, ids, weights, *sizes, np.int64(num_slots))
    device.launch("route_experts", grid, args, overlaps=True, PER_LANE=math.ceil(num_experts / _WARP))
    return ids, weights


def route_to_groups(
    device: KernelLauncher, logits: Array, how: tuple[int, bool], slots: Array | None, num_slots: int
) -> tuple[Array, ExpertGroups]:
    """Implement `Ops.route_to_groups`, in one launch for few rows; `how` is (num_used, renormalise)."""
    num_rows, num_experts, num_used, renormalise = _expect_routes(logits, how, slots)
    if not 0 < num_rows <= MAX_FEW_ROWS or num_used > _WARP:
        ids, weights = route_experts(device, logits, how, slots, num_slots)
        return weights, group_by_expert(device, ids, num_experts)
    weights = device.temporary((num_rows, num_used), _FLOAT32)
    groups = _new_groups(device, (num_rows, num_used), num_experts)
    sizes = map(np.int32, (num_rows, num_experts, num_used, renormalise))
    args = (logits, slots, weights, groups.rows, groups.places, groups.offsets, *sizes, np.int64(num_slots))
    threads = _WARP * MAX_FEW_ROWS
    device.launch("route_few", (1,), args, threads=threads, overlaps=True, PER_LANE=math.ceil(num_experts / _WARP))
    return weights, groups


def group_by_expert(device: KernelLauncher, ids: Array, num_experts: int) -> ExpertGroups:
    """Implement `Ops.group_by_expert`."""
    expect("ids", ids, _INT32, None, None)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"group_by_expert: {num_experts} experts are not supported (1..{MAX_EXPERTS})")
    groups = _new_groups(device, ids.shape, num_experts)
    sizes = map(np.int32, (ids.size, num_experts, ids.shape[1]))
    args = (ids, groups.rows, groups.places, groups.offsets, *sizes)
    shared_bytes = 4 * _GROUP_WARPS * num_experts
    device.launch("group_by_expert", (1,), args, threads=_WARP * _GROUP_WARPS, shared_bytes=shared_bytes, overlaps=True)
    return groups


def combine_experts(device: KernelLauncher, x: Array, groups: ExpertGroups, weights: Array) -> Array:
    """Implement `Ops.combine_experts`."""
    num_rows, num_used = groups.places.shape
    width = x.shape[1]
    expect("x", x, device.dtype, num_rows * num_used, width)
    expect("places", groups.places, _INT32, num_rows, num_used)
    expect("weights", weights, _FLOAT32, num_rows, num_used)
    out = device.temporary((num_rows, width), device.dtype)
    args = (x, groups.places, weights, out, np.int32(num_used), np.int32(width))
    device.launch("combine_experts", (num_rows,), args, overlaps=True)
    return out


def _expect_routes(logits: Array, how: tuple[int, bool], slots: Array | None) -> tuple[int, int, int, bool]:
    expect("logits", logits, _FLOAT32, None, None)
    (num_rows, num_experts), (num_used, renormalise) = logits.shape, how
    if slots is not None:
        expect("slots", slots, _INT64, num_rows)
    if not 1 <= num_used <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"route_experts: {num_used} of {num_experts} experts is not supported (1..{MAX_EXPERTS})")
    return num_rows, num_experts, num_used, renormalise


def _new_groups(device: KernelLauncher, shape: tuple[int, int], num_experts: int) -> ExpertGroups:
    rows, places = device.temporary((math.prod(shape),), _INT32), device.temporary(shape, _INT32)
    return ExpertGroups(rows, places, device.temporary((num_experts + 1,), _INT32))

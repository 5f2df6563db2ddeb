"""Launches the kernels that do several operations of experts at once, for few rows."""

from __future__ import annotations

import math

import numpy as np

from model.ops.gpu.experts.builds import MAX_EXPERTS, gemv_build, takes_sm90
from model.ops.gpu.experts.launches import combine_experts
from model.ops.gpu.experts.products import expect_operands, experts_linear
from model.ops.gpu.launcher import KernelLauncher, expect
from model.ops.interface import Array, ExpertGroups, Routing
from model.ops.weight import ExpertWeights, Weight, WeightFormat

_ROW_WARPS = 16  # of experts_row
_ROW_STAGES = 2
"""H200: three take 5 us more a layer."""
_ROW_WIDTH = 4096  # at most: a vector a thread
_SPAN = 128
_STATIC_BYTES = 6 << 10
_MAX_USED = 32  # of a row
_WARP = 32
_TILE_ROWS = 16
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


def can_take_row(device: KernelLauncher, x: Array, experts: ExpertWeights, routing: Routing) -> bool:
    """Return whether experts_row takes this row and these sizes."""
    (num_experts, _, hidden), inner = experts.gate_up.data.shape, experts.down.shape[1]
    formats = {weight.format for weight in (experts.router, experts.gate_up, experts.down)}
    is_one = device.arch == "90a" and device.dtype != _FLOAT32 and len(x) == 1 and formats == {WeightFormat.DENSE}
    sizes_fit = num_experts <= MAX_EXPERTS and hidden <= _ROW_WIDTH and hidden % _TILE_ROWS == 0 and inner % 8 == 0
    if not is_one or not sizes_fit or not 1 <= routing.num_used <= min(_MAX_USED, num_experts):
        return False
    return _row_bytes(hidden, inner, routing.num_used, device.num_sms) <= device.max_shared_bytes - _STATIC_BYTES


def _row_bytes(hidden: int, inner: int, num_used: int, num_blocks: int) -> int:
    """Return the dynamic shared memory of experts_row: rings, the row, the gated rows, sums."""
    rounds, spans = math.ceil(hidden / (_ROW_WARPS * _SPAN)), math.ceil(inner / _SPAN)
    units, parts = math.ceil(inner // 8 * num_used / num_blocks), math.ceil(spans * num_used / _ROW_WARPS)
    ring, rows = _ROW_WARPS * _ROW_STAGES * _TILE_ROWS * _SPAN * 2, (rounds * _ROW_WARPS + spans * num_used) * _SPAN * 2
    return ring + rows + max(units, 2 * parts) * _ROW_WARPS * _TILE_ROWS * 4


def experts_of_row(
    device: KernelLauncher,
    sums: tuple[Array, Array],
    norm: tuple[Array, float],
    experts: ExpertWeights,
    routing: Routing,
    arrived: Array,
) -> Array:
    """`Ops.add_norm_experts`, where `can_take_row`; `sums`: x, residual; `norm`: weight, eps; `arrived` uint32[1], 0
    before the first call."""
    (x, residual), (weight, eps), dtype = sums, norm, device.dtype
    (num_experts, n, hidden), num_used = experts.gate_up.data.shape, routing.num_used
    inner = n // 2
    shapes = {"x": (x, (1, hidden)), "residual": (residual, (1, hidden)), "weight": (weight, (hidden,))}
    shapes |= {
        "router": (experts.router.data, (num_experts, hidden)),
        "gate_up": (experts.gate_up.data, (num_experts, n, hidden)),
    }
    shapes |= {"down": (experts.down.data, (num_experts, hidden, inner))}
    for name, (array, shape) in shapes.items():
        expect(name, array, dtype, *shape)
    if routing.slots is not None:
        expect("slots", routing.slots, _INT64, 1)
    out, gated = device.temporary((1, hidden), dtype), device.temporary((num_used, inner), dtype)
    logits = device.temporary((num_experts,), _FLOAT32)
    inputs = (x, residual, weight, experts.router.data, experts.gate_up.data, experts.down.data, routing.slots)
    sizes = map(np.int32, (hidden, inner, num_experts, num_used, routing.renormalise))
    device.launch(
        "experts_row",
        (device.num_sms,),
        (*inputs, logits, gated, out, arrived, *sizes, np.int64(routing.num_slots), np.float32(eps)),
        threads=_WARP * _ROW_WARPS,
        shared_bytes=_row_bytes(hidden, inner, num_used, device.num_sms),
        overlaps=True,
        STAGES=_ROW_STAGES,
    )
    return out


def can_gate(device: KernelLauncher, gate_up: Weight, down: Weight, groups: ExpertGroups) -> bool:
    """Return whether the products of these rows are read by the GEMV kernels of 16-bit weights."""
    num_rows, num_pairs, num_experts = len(groups.places), len(groups.rows), len(gate_up.data)
    is_dense = gate_up.format is WeightFormat.DENSE and down.format is WeightFormat.DENSE
    is_few = num_pairs > 0 and not (device.arch == "90a" and takes_sm90(num_rows, num_pairs / num_experts, True))
    return is_dense and is_few


def gate_and_sum(
    device: KernelLauncher, x: Array, stacks: tuple[Weight, Weight], groups: ExpertGroups, weights: Array
) -> Array:
    """`Ops.gated_experts`, where `can_gate`; `stacks`: gate_up, down."""
    gate_up, down = stacks
    gated = _launch_gated(device, x, gate_up, groups)
    pairs = experts_linear(device, gated, down, groups, is_sorted=True, knows_groups=True)
    return combine_experts(device, pairs, groups, weights)


def _launch_gated(device: KernelLauncher, x: Array, weight: Weight, groups: ExpertGroups) -> Array:
    """Return [P, I]: `silu_mul` of the products with gate_up."""
    num_rows, num_pairs, (num_experts, n, k) = len(groups.places), len(groups.rows), weight.data.shape
    expect_operands(device, x, weight, groups, num_rows)
    build = gemv_build(num_rows, num_pairs / num_experts)
    out = device.temporary((num_pairs, n // 2), device.dtype)
    device.launch(
        "experts_gemv",
        (min(num_pairs * math.ceil(n / _TILE_ROWS), build.blocks_per_sm * device.num_sms),),
        (x, groups.rows, weight.data, groups.offsets, out, *map(np.int32, (num_experts, n, k))),
        threads=_WARP * build.warps,
        shared_bytes=build.shared_bytes + 4 * num_experts,
        overlaps=True,
        OUT_FLOAT=0,
        GATED=1,
        KNOWN=0,
        **build.defines,
    )
    return out

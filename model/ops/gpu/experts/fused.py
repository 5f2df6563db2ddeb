"""Launches the kernels that fuse several expert operations, for few rows of 16-bit weights."""

from __future__ import annotations

import math

import numpy as np

from model.ops.gpu.experts.builds import gemv_build, takes_sm90
from model.ops.gpu.experts.launches import combine_experts
from model.ops.gpu.experts.products import expect_operands, experts_linear
from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array, ExpertGroups
from model.ops.weight import Weight, WeightFormat

_WARP = 32
_TILE_ROWS = 16


def can_gate(device: KernelLauncher, gate_up: Weight, down: Weight, groups: ExpertGroups) -> bool:
    """Return whether the GEMV kernels of 16-bit weights compute the products of these rows."""
    num_rows, num_pairs, num_experts = len(groups.places), len(groups.rows), len(gate_up.data)
    is_dense = gate_up.format is WeightFormat.DENSE and down.format is WeightFormat.DENSE
    is_few = num_pairs > 0 and not (device.arch == "90a" and takes_sm90(num_rows, num_pairs / num_experts, True))
    return is_dense and is_few


def gate_and_sum(
    device: KernelLauncher, x: Array, stacks: tuple[Weight, Weight], groups: ExpertGroups, weights: Array
) -> Array:
    """Implement `Ops.gated_experts` where `can_gate` is true; `stacks` is (gate_up, down)."""
    gate_up, down = stacks
    gated = _launch_gated(device, x, gate_up, groups)
    pairs = experts_linear(device, gated, down, groups, is_sorted=True, knows_groups=True)
    return combine_experts(device, pairs, groups, weights)


def _launch_gated(device: KernelLauncher, x: Array, weight: Weight, groups: ExpertGroups) -> Array:
    """Return [P, I], `silu_mul` of the products with gate_up."""
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

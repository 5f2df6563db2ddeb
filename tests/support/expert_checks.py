"""Stacks of experts, routed rows, and their products by the NumPy reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.fp8 import quantise
from model.ops.interface import ExpertGroups, Fp8Rows
from model.ops.weight import Weight, WeightFormat
from tests.support.kernel_checks import NUMPY_DTYPES

REFERENCE = NumpyOps()


def routed_ids(rng: np.random.Generator, num_rows: int, num_experts: int, num_used: int) -> np.ndarray:
    """int32[T, k]: different experts in a row, some far more often than others."""
    logits = rng.standard_normal((num_rows, num_experts)) + 2 * rng.standard_normal(num_experts)
    return REFERENCE.route_experts(logits.astype(np.float32), num_used, False)[0]


def random_stack(rng: np.random.Generator, shape: tuple[int, int, int], kind: WeightFormat, dtype: np.dtype) -> Weight:
    """A stack [E, N, K] whose products are near one."""
    num_experts, num_outputs, num_inputs = shape
    if kind is WeightFormat.DENSE:
        return Weight((rng.standard_normal(shape, np.float32) * num_inputs**-0.5).astype(dtype))
    rows, scale = quantise(rng.standard_normal((num_experts * num_outputs, num_inputs), np.float32) * num_inputs**-0.5)
    data = rows.reshape(shape)
    if kind is WeightFormat.INT8:
        return Weight(rng.integers(-127, 128, shape, np.int8), kind, scale.reshape(shape[:2]))
    if kind is WeightFormat.FP8_BLOCK:
        blocks = (num_experts, math.ceil(num_outputs / 128), math.ceil(num_inputs / 128))
        return Weight(data, kind, (rng.random(blocks, np.float32) + np.float32(0.5)) * scale.mean())
    return Weight(data, kind, scale.reshape(shape[:2]))


def random_int4_stack(
    rng: np.random.Generator, shape: tuple[int, int, int], group_size: int, has_zeros: bool, scale_dtype: str
) -> Weight:
    """A stack [E, N, K] of 4-bit weights whose products are near one."""
    num_experts, num_outputs, num_inputs = shape
    groups = (num_experts, num_outputs, num_inputs // group_size)
    scale = (rng.random(groups, np.float32) + np.float32(0.5)) * np.float32(num_inputs**-0.5 / 4.6)
    zeros = rng.integers(0, 16, groups, np.uint8) if has_zeros else None
    data = rng.integers(0, 256, (num_experts, num_outputs, num_inputs // 2), np.uint8)
    return Weight(data, WeightFormat.INT4, scale.astype(NUMPY_DTYPES[scale_dtype]), zeros, group_size)


def upload_stack(ops, weight: Weight) -> Weight:
    """Return a copy on the device, as `prepare_weight` leaves it."""

    def uploaded(array):
        return None if array is None else ops.upload(array)

    arrays = {name: uploaded(getattr(weight, name)) for name in ("data", "scale", "zero_point")}
    return ops.prepare_weight(replace(weight, **arrays))


def upload_groups(ops, groups: ExpertGroups) -> ExpertGroups:
    return ExpertGroups(*(ops.upload(array) for array in (groups.rows, groups.places, groups.offsets)))


def product_of_pairs(x, weight: Weight, groups: ExpertGroups, *, is_sorted: bool) -> np.ndarray:
    """float32[P, N]."""
    rows = x if isinstance(x, Fp8Rows) else x.astype(np.float32)
    stack = weight if weight.format is not WeightFormat.DENSE else Weight(weight.data.astype(np.float32))
    return REFERENCE.experts_linear(rows, stack, groups, is_sorted=is_sorted)


def gated_stacks(ops, rng: np.random.Generator, num_experts: int, inner: int, hidden: int) -> tuple[Weight, Weight]:
    """Return gate_up [E, 2 I, H] and down [E, H, I] on the device."""
    sizes = (2 * inner, hidden), (hidden, inner)
    gate_up, down = (random_stack(rng, (num_experts, *each), WeightFormat.DENSE, ops.dtype) for each in sizes)
    return upload_stack(ops, gate_up), upload_stack(ops, down)

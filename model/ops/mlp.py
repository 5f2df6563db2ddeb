"""The gated MLP, one operation after the other."""

from __future__ import annotations

from model.ops.interface import Array, Fp8Rows, Ops
from model.ops.weight import Weight, WeightFormat


def takes_fp8(ops: Ops, weight: Weight) -> bool:
    """Return whether the inputs of `weight` are rounded to e4m3."""
    return weight.format is WeightFormat.FP8 and weight.quantised_input and ops.has_fp8


def add_norm_gated_mlp(
    ops: Ops, sums: tuple[Array, Array], norm: tuple[Array, float], gate_up: Weight, down: Weight
) -> Array:
    """Implement `Ops.add_norm_gated_mlp`; `sums` is (x, residual), `norm` (weight, eps)."""
    activation = ops.silu_mul_quantised if takes_fp8(ops, down) else ops.silu_mul
    return ops.linear(activation(ops.add_norm_linear(*sums, norm, gate_up)), down)


def gated_mlp(ops: Ops, x: Array | Fp8Rows, gate_up: Weight, down: Weight) -> Array:
    """Implement `Ops.gated_mlp`."""
    activation = ops.silu_mul_quantised if takes_fp8(ops, down) else ops.silu_mul
    return ops.linear(activation(ops.linear(x, gate_up)), down)

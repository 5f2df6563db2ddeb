"""Expert operations, one by one."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from model.ops.interface import Array, ExpertGroups, Fp8Rows, Ops, Routing
from model.ops.mlp import takes_fp8
from model.ops.weight import ExpertWeights, Weight


class ExpertAdapters(Protocol):
    """Adapters of one layer's router and experts, for the rows of a step."""

    def add_to_logits(self, x: Array, logits: Array) -> None:
        """Add the product of x [T, H] to logits float32[T, E]."""

    def add_to_gate_up(self, x: Array, product: Array, groups: ExpertGroups) -> None:
        """Add the product of x [T, H] to `product` [P, 2 I]."""

    def add_to_down(self, gated: Array | Fp8Rows, product: Array, groups: ExpertGroups) -> None:
        """Add the product of gated [P, I] to `product` [P, H]."""


def add_norm_experts(
    ops: Ops, sums: tuple[Array, Array], norm: tuple[Array, float], experts: ExpertWeights, routing: Routing
) -> Array:
    """Implement `Ops.add_norm_experts`; `sums` is (x, residual), `norm` (weight, eps)."""
    gate_up, down = experts.gate_up, experts.down
    x = ops.add_rms_norm(*sums, *norm)
    logits = ops.linear(x, experts.router, dtype=np.dtype(np.float32))
    how = routing.num_used, routing.renormalise, routing.slots, routing.num_slots
    weights, groups = ops.route_to_groups(logits, *how)
    if not takes_fp8(ops, gate_up) and not takes_fp8(ops, down):
        return ops.gated_experts(x, gate_up, down, groups, weights)
    product = ops.experts_linear(ops.quantise_rows(x) if takes_fp8(ops, gate_up) else x, gate_up, groups)
    activation = ops.silu_mul_quantised if takes_fp8(ops, down) else ops.silu_mul
    return ops.combine_experts(ops.experts_linear(activation(product), down, groups, is_sorted=True), groups, weights)


def add_norm_adapted_experts(
    ops: Ops,
    adapters: ExpertAdapters,
    sums: tuple[Array, Array],
    norm: tuple[Array, float],
    experts: ExpertWeights,
    routing: Routing,
) -> Array:
    """Implement `Ops.add_norm_experts` with adapters of the router and the experts."""
    gate_up, down = experts.gate_up, experts.down
    x = ops.add_rms_norm(*sums, *norm)
    logits = ops.linear(x, experts.router, dtype=np.dtype(np.float32))
    adapters.add_to_logits(x, logits)
    how = routing.num_used, routing.renormalise, routing.slots, routing.num_slots
    weights, groups = ops.route_to_groups(logits, *how)
    product = ops.experts_linear(ops.quantise_rows(x) if takes_fp8(ops, gate_up) else x, gate_up, groups)
    adapters.add_to_gate_up(x, product, groups)
    gated = ops.silu_mul_quantised(product) if takes_fp8(ops, down) else ops.silu_mul(product)
    out = ops.experts_linear(gated, down, groups, is_sorted=True)
    adapters.add_to_down(gated, out, groups)
    return ops.combine_experts(out, groups, weights)


def gated_experts(ops: Ops, x: Array, stacks: tuple[Weight, Weight], groups: ExpertGroups, weights: Array) -> Array:
    """Implement `Ops.gated_experts`; `stacks` is (gate_up, down)."""
    gate_up, down = stacks
    gated = ops.silu_mul(ops.experts_linear(x, gate_up, groups))
    return ops.combine_experts(ops.experts_linear(gated, down, groups, is_sorted=True), groups, weights)

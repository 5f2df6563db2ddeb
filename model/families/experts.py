"""An MLP of experts: a router picks a few for each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.families.configs.family import ExpertsConfig
from model.ops.interface import Array, Ops
from model.ops.weight import Weight, WeightFormat


@dataclass(frozen=True)
class Experts:
    """Weights of one layer."""

    router: Weight  # [E, H], never quantised
    gate_up: Weight  # [E, 2 I, H]
    down: Weight  # [E, H, I]


def experts_mlp(
    ops: Ops, config: ExpertsConfig, experts: Experts, x: Array, slots: Array | None = None, num_slots: int = 0
) -> Array:
    """x [T, H] -> [T, H]: the sum of each token's experts, weighted by the router's softmax; zeros for padding, whose
    slot is outside 0..num_slots - 1.

    Every size follows from T, so a step of T rows can be captured.
    """
    logits = ops.linear(x, experts.router, dtype=np.dtype(np.float32))
    weights, groups = ops.route_to_groups(logits, config.num_used, config.renormalises, slots, num_slots)
    rows = ops.quantise_rows(x) if _takes_fp8(ops, experts.gate_up) else x
    gate_up = ops.experts_linear(rows, experts.gate_up, groups)
    activation = ops.silu_mul_quantised if _takes_fp8(ops, experts.down) else ops.silu_mul
    down = ops.experts_linear(activation(gate_up), experts.down, groups, is_sorted=True)
    return ops.combine_experts(down, groups, weights)


def _takes_fp8(ops: Ops, weight: Weight) -> bool:
    return weight.format is WeightFormat.FP8 and weight.quantised_input and ops.has_fp8

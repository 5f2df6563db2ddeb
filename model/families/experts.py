"""An MLP of experts: a router picks a few for each token."""

from __future__ import annotations

from model.families.configs.family import ExpertsConfig
from model.ops.experts import ExpertAdapters, add_norm_adapted_experts
from model.ops.interface import Array, Ops, Routing
from model.ops.weight import ExpertWeights


def experts_mlp(
    ops: Ops,
    config: ExpertsConfig,
    experts: ExpertWeights,
    sums: tuple[Array, Array],
    norm: tuple[Array, float],
    slots: tuple[Array | None, int] = (None, 0),
    adapters: ExpertAdapters | None = None,
) -> Array:
    """Add x to residual (`sums`, [T, H]); return [T, H], the experts' sum for its norm (weight, eps), weighted by the
    router's softmax. Padding, whose slot is outside 0..num_slots - 1, gives zeros.

    Every size follows from T, so a step of T rows can be captured.
    """
    routing = Routing(config.num_used, config.renormalises, *slots)
    if adapters is not None:
        return add_norm_adapted_experts(ops, adapters, sums, norm, experts, routing)
    return ops.add_norm_experts(*sums, *norm, experts, routing)

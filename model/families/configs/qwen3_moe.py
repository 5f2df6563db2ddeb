"""Qwen3 with experts: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import ExpertsConfig, Family, no_windows, window_of_all


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Read the experts and their layers: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    name = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"  # transformers 5's name
    num_experts = fields.integer(name, 128, high=1 << 10)
    for shared in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        if fields.integer(shared, 0, low=0, high=1 << 20):
            raise fields.error(shared, "shared experts are not supported (0)")
    step = fields.integer("decoder_sparse_step", 1, high=1 << 10)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.error("mlp_only_layers", "is not a list of layers")
    return ExpertsConfig(
        num_experts=num_experts,
        num_used=fields.integer("num_experts_per_tok", 8, high=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 768, high=1 << 20),
        renormalises=fields.boolean("norm_topk_prob", False),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Slide in every layer or none: max_window_layers has no effect in transformers."""
    return (window_of_all if fields.boolean("use_sliding_window", False) else no_windows)(fields, num_layers)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    windows=_windows,
    experts=_experts,
)

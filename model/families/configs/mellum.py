"""Mellum 2: Qwen3-MoE with a window and a separate rope in some layers; its draft layers are not loaded."""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import (
    ExpertsConfig,
    Family,
    LayerTensors,
    full_attention_scaling,
    layer_types,
    ropes_of_types,
    windows_of_types,
)
from model.rope_config import RopeConfig, RopeRules

RULES = RopeRules(default_theta=500000.0)
SLIDING_THETA = 10000.0
MLP_TYPES = ("dense", "sparse")


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    kinds = fields.get("mlp_layer_types") or ["sparse"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in MLP_TYPES for kind in kinds):
        raise fields.error("mlp_layer_types", f"not {num_layers} times one of {', '.join(MLP_TYPES)}")
    name = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    num_experts = fields.integer(name, 64, high=1 << 10)
    return ExpertsConfig(
        num_experts=num_experts,
        num_used=fields.integer("num_experts_per_tok", 8, high=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 896, high=1 << 20),
        renormalises=fields.boolean("norm_topk_prob", True),
        layers=tuple(kind == "sparse" for kind in kinds),
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    kinds = layer_types(fields, num_layers) or ["full_attention"] * num_layers
    return windows_of_types(kinds, fields.integer("sliding_window", 1024, high=NO_WINDOW))


def _ropes(fields: Fields, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig, ...]:
    return ropes_of_types(fields, rope, windows, RULES, SLIDING_THETA)


MELLUM = Family(
    model_type="mellum",
    architecture="MellumForCausalLM",
    tensors=LayerTensors(left_out=("mtp.",)),
    qk_norm=True,
    default_head_dim=128,
    rope_rules=RULES,
    scaling=full_attention_scaling,
    windows=_windows,
    ropes=_ropes,
    experts=_experts,
)

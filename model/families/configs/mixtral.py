"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import ExpertsConfig, Family, LayerTensors, no_biases, window_of_all
from model.rope_config import RopeRules


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    num_experts = fields.integer("num_local_experts", 8, high=1 << 10)
    return ExpertsConfig(
        num_experts=num_experts,
        num_used=fields.integer("num_experts_per_tok", 2, high=num_experts),
        intermediate_size=fields.integer("intermediate_size", high=1 << 20),
        renormalises=True,
        layers=(True,) * num_layers,
    )


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors=LayerTensors(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
        renamed=(("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
    ),
    biases=no_biases,
    rope_rules=RopeRules(default_theta=1000000.0),
    windows=window_of_all,
    experts=_experts,
)

"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from model.families.configs.family import Family, LayerTensors, experts_in_every_layer, no_biases, window_of_all
from model.rope_config import RopeRules

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
    experts=experts_in_every_layer,
)

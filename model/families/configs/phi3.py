"""Phi-3, Phi-3.5 and Phi-4, mini included: fused matrices, a rope of part of a head, longrope."""

from __future__ import annotations

from model.families.configs.family import Family, LayerTensors, no_biases, window_of_all
from model.rope_config import RopeRules

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    tensors=LayerTensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    biases=no_biases,
    rope_rules=RopeRules(kinds=("default", "longrope"), is_partial=True),
    windows=window_of_all,
)

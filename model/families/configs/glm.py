"""GLM-4-9B in transformers' form (`glm`): half of each head rotates, in adjacent pairs; gate and up are one matrix."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import Biases, Family, LayerTensors
from model.rope_config import RopeRules


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.boolean("attention_bias", True))


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    tensors=LayerTensors(gate_up=("mlp.gate_up_proj",)),
    biases=_biases,
    default_head_dim=128,
    rope_rules=RopeRules(is_partial=True, default_rotary_fraction=0.5, is_interleaved=True),
)

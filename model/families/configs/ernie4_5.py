"""ERNIE 4.5 without experts: a rope that rotates neighbours, one field for all biases."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import Biases, Family
from model.rope_config import RopeRules


def _biases(fields: Fields) -> Biases:
    has_biases = fields.boolean("use_bias", False)
    return Biases(qkv=has_biases, output=has_biases, mlp=has_biases)


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    biases=_biases,
    ties_embeddings=True,
    default_head_dim=128,
    rope_rules=RopeRules(is_interleaved=True, default_theta=500000.0),
)

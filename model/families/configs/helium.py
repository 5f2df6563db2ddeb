"""Helium: a rope that rotates neighbours, no bias of o."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import Biases, Family
from model.rope_config import RopeRules


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.boolean("attention_bias", False), mlp=fields.boolean("mlp_bias", False))


HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    biases=_biases,
    default_head_dim=128,
    rope_rules=RopeRules(is_interleaved=True, default_theta=100000.0),
)

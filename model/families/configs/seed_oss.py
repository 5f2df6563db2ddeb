"""Seed-OSS: Llama with biases of q, k and v, and a separate field for o's."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import Biases, Family


def _biases(fields: Fields) -> Biases:
    return Biases(
        qkv=fields.boolean("attention_bias", True),
        output=fields.boolean("attention_out_bias", False),
        mlp=fields.boolean("mlp_bias", False),
    )


SEED_OSS = Family(model_type="seed_oss", architecture="SeedOssForCausalLM", biases=_biases, default_head_dim=128)

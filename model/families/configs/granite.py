"""Granite 3: Llama with four multipliers, which `model/weights/folding.py` folds into weights and epsilon."""

from __future__ import annotations

from model.config_fields import Fields
from model.families.configs.family import Family, Multipliers, llama_biases


def _multipliers(fields: Fields) -> Multipliers:
    return Multipliers(
        embedding=fields.number("embedding_multiplier", 1.0, above=0, high=1e4),
        residual=fields.number("residual_multiplier", 1.0, above=0, high=1e4),
        attention=fields.number("attention_multiplier", 1.0, above=0, high=1e4),
        logits_divisor=fields.number("logits_scaling", 1.0, above=0, high=1e4),
    )


GRANITE = Family(model_type="granite", architecture="GraniteForCausalLM", biases=llama_biases, multipliers=_multipliers)

"""A small config.json of any family."""

from __future__ import annotations

from typing import Any

from model.config import ModelConfig
from model.families.configs.registry import FAMILIES

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


WITHOUT_MAMBA = {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 80}


def family_config(family: str, **fields: Any) -> dict[str, Any]:
    own = WITHOUT_MAMBA if family == "granitemoehybrid" else {}
    return {**SHAPE, **own, "model_type": family, "architectures": [FAMILIES[family].architecture], **fields}


def wrapped_config(family: str, outer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A config of Mistral's wrapper, whose text_config has no architectures."""
    inner = {**SHAPE, "model_type": family, **fields}
    architectures = ["Mistral3ForConditionalGeneration"]
    return {"model_type": "mistral3", "architectures": architectures, "text_config": inner, **(outer or {})}


def read_family(family: str, **fields: Any) -> ModelConfig:
    return ModelConfig.from_dict(family_config(family, **fields))

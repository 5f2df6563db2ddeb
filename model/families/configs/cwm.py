"""CWM: Llama 3 with a window in three of four layers; the first has none."""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import LAYER_TYPES, Biases, Family, layer_types, llama_scaling, windows_of_types
from model.rope_config import RopeRules

SCALING = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rope of a config that has none."""


def _biases(fields: Fields) -> Biases:
    return Biases(mlp=fields.boolean("mlp_bias", False))


def _scaling(fields: Fields) -> Fields:
    scaling = llama_scaling(fields)
    return scaling if scaling.raw else Fields(SCALING, fields.source)


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    kinds = layer_types(fields, num_layers)
    if kinds is None:
        kinds = [LAYER_TYPES[layer % 4 != 0] for layer in range(num_layers)]
    return windows_of_types(kinds, fields.integer("sliding_window", 8192, high=NO_WINDOW))


CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    biases=_biases,
    rope_rules=RopeRules(default_theta=1000000.0),
    scaling=_scaling,
    windows=_windows,
)

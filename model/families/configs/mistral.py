"""Mistral 7B, Nemo, Small 3 (`mistral`), Ministral 8B (`ministral`), Ministral 3 (`ministral3`).

Mistral Small 3.1, 3.2 and Ministral 3 are wrapped (`mistral3`): one of these in text_config, plus a vision encoder.
"""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import Family, layer_types, no_biases, window_of_all, windows_of_types
from model.rope_config import RopeRules

WRAPPER = "mistral3"
WRAPPER_ARCHITECTURE = "Mistral3ForConditionalGeneration"
WRAPPED = ("mistral", "ministral", "ministral3")
DEFAULT_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2}
"""Token ids that a wrapper's text_config omits, as in transformers."""


def _windows_by_type(fields: Fields, num_layers: int) -> tuple[int, ...]:
    kinds = layer_types(fields, num_layers)
    if kinds is None:
        return window_of_all(fields, num_layers)
    window = fields.integer("sliding_window", None if "sliding_attention" not in kinds else 4096, high=NO_WINDOW)
    return windows_of_types(kinds, window or NO_WINDOW)


MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM", biases=no_biases, windows=window_of_all)
MINISTRAL = Family(
    model_type="ministral", architecture="MinistralForCausalLM", biases=no_biases, windows=_windows_by_type
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    biases=no_biases,
    rope_rules=RopeRules(scales_queries=True),
    windows=window_of_all,
)

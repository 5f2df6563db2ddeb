"""Qwen 2, 2.5 and 3, Qwen3-Embedding, Qwen3-Reranker, and DeepSeek-R1's distills into them."""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import LAYER_TYPES, Biases, Family, layer_types, windows_of_types


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Read layer_types, else slide from max_window_layers on; no windows without use_sliding_window."""
    kinds = layer_types(fields, num_layers)
    if not fields.boolean("use_sliding_window", False):
        return (NO_WINDOW,) * num_layers
    window = fields.integer("sliding_window", 4096, high=NO_WINDOW)
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0, high=1 << 10)
        kinds = [LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    return windows_of_types(kinds, window)


def _qwen2_biases(fields: Fields) -> Biases:
    return Biases(qkv=True)


QWEN2 = Family(model_type="qwen2", architecture="Qwen2ForCausalLM", biases=_qwen2_biases, windows=_windows)
QWEN3 = Family(
    model_type="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True, default_head_dim=128, windows=_windows
)

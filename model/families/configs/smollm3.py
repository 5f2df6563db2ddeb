"""SmolLM3: Llama with layers that do not rotate. In `no_rope_layers`, 1 means that a layer DOES rotate."""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import LAYER_TYPES, Family, layer_types, llama_biases, windows_of_types
from model.rope_config import RopeConfig, RopeRules


def _rotates(fields: Fields, num_layers: int) -> list[bool]:
    flags = fields.get("no_rope_layers")
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", 4, high=1 << 10)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"not {num_layers} times 0 or 1")
    return [flag == 1 for flag in flags[:num_layers]]


def _ropes(fields: Fields, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig, ...]:
    unrotated = RopeConfig(kind="none", theta=rope.theta)
    return tuple(rope if rotates else unrotated for rotates in _rotates(fields, len(windows)))


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    kinds = layer_types(fields, num_layers)
    window = fields.integer("sliding_window", None, high=NO_WINDOW)
    if not fields.boolean("use_sliding_window", False) or window is None:
        return (NO_WINDOW,) * num_layers
    if kinds is None:
        kinds = [LAYER_TYPES[not rotates] for rotates in _rotates(fields, num_layers)]
    return windows_of_types(kinds, window)


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    biases=llama_biases,
    ties_embeddings=True,
    rope_rules=RopeRules(default_theta=2000000.0),
    windows=_windows,
    ropes=_ropes,
)

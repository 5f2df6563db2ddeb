"""OLMo 2 and 3: norms after attention and MLP, and of q and k over all heads; OLMo 3 has windows in three of four
layers.

OLMoE has experts, and norms before attention and MLP.
"""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import (
    NORM_AFTER,
    ExpertsConfig,
    Family,
    full_attention_every,
    full_attention_scaling,
    layer_types,
    ropes_of_types,
    windows_of_types,
)
from model.rope_config import RopeConfig, RopeRules

RULES = RopeRules(default_theta=500000.0)


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    kinds = layer_types(fields, num_layers)
    if kinds is None:
        kinds = full_attention_every(4, num_layers)
    return windows_of_types(kinds, fields.integer("sliding_window", 4096, high=NO_WINDOW))


def _ropes(fields: Fields, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig, ...]:
    return ropes_of_types(fields, rope, windows, RULES, rope.theta)


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    if fields.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", "is not supported (null)")
    num_experts = fields.integer("num_experts", 64, high=1 << 10)
    return ExpertsConfig(
        num_experts=num_experts,
        num_used=fields.integer("num_experts_per_tok", 8, high=num_experts),
        intermediate_size=fields.integer("intermediate_size", high=1 << 20),
        renormalises=fields.boolean("norm_topk_prob", False),
        layers=(True,) * num_layers,
    )


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    tensors=NORM_AFTER,
    qk_norm=True,
    qk_norm_whole=True,
    norm_after=True,
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    tensors=NORM_AFTER,
    qk_norm=True,
    qk_norm_whole=True,
    norm_after=True,
    rope_rules=RULES,
    scaling=full_attention_scaling,
    windows=_windows,
    ropes=_ropes,
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    qk_norm=True,
    qk_norm_whole=True,
    experts=_experts,
)

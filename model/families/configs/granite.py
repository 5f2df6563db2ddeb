"""Granite 3 and 4: Llama with four multipliers, which `model/weights/folding.py` folds into weights and epsilon.

Granite 4 (`granitemoehybrid`) is supported if all layers have attention and an MLP without experts, called shared.
"""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import Family, LayerTensors, Multipliers, experts_in_every_layer, llama_biases
from model.rope_config import RopeConfig


def _multipliers(fields: Fields) -> Multipliers:
    return Multipliers(
        embedding=fields.number("embedding_multiplier", 1.0, above=0, high=1e4),
        residual=fields.number("residual_multiplier", 1.0, above=0, high=1e4),
        attention=fields.number("attention_multiplier", 1.0, above=0, high=1e4),
        logits_divisor=fields.number("logits_scaling", 1.0, above=0, high=1e4),
    )


def _full_attention(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return no windows. Raises ModelError for experts or layers without attention."""
    if fields.integer("num_local_experts", 8, low=0, high=1 << 10):
        raise fields.error("num_local_experts", "experts next to a shared MLP are not supported (0)")
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    if not isinstance(kinds, list) or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise fields.error("layer_types", "layers without attention are not supported (attention)")
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"names {len(kinds)} layers of {num_layers}")
    return (NO_WINDOW,) * num_layers


def _ropes(fields: Fields, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig, ...]:
    rotates = fields.text("position_embedding_type", "nope") == "rope"
    return () if rotates else (RopeConfig(kind="none", theta=rope.theta),) * len(windows)


GRANITE = Family(model_type="granite", architecture="GraniteForCausalLM", biases=llama_biases, multipliers=_multipliers)
GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    tensors=LayerTensors(
        router="block_sparse_moe.router",
        experts="block_sparse_moe.experts",
        renamed=(("router.layer", "router"),),
    ),
    multipliers=_multipliers,
    experts=experts_in_every_layer,
)
GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    tensors=LayerTensors(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
    intermediate_field="shared_intermediate_size",
    windows=_full_attention,
    ropes=_ropes,
    multipliers=_multipliers,
)

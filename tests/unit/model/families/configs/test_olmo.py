"""OLMo 2 and 3: norms after, windows and ropes by layer."""

from __future__ import annotations

import pytest

from model.errors import ModelError
from model.ops.interface import NO_WINDOW
from model.weights.checkpoint import expected_shapes
from tests.support.family_configs import read_family

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_norms_are_named_and_sized_as_stored():
    config = read_family("olmo2")
    shapes = expected_shapes(config)
    assert (config.norm_after, config.qk_norm_whole) == (True, True)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (64,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (32,)
    assert shapes["model.layers.0.post_feedforward_layernorm.weight"] == (64,)
    assert "model.layers.0.input_layernorm.weight" not in shapes


def test_three_of_four_layers_slide_on_plain_frequencies():
    config = read_family("olmo3", sliding_window=8, rope_scaling=YARN, rope_theta=500000.0)
    assert config.windows == (8, 8, 8, NO_WINDOW)
    assert [rope.kind for rope in config.ropes] == ["default"] * 3 + ["yarn"]
    assert {rope.theta for rope in config.ropes} == {500000.0}
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    assert read_family("olmo3", layer_types=kinds).windows == (*(NO_WINDOW,) * 3, 4096)


def test_transformers_5_spells_a_rope_for_each_kind_of_layer():
    ropes = {
        "full_attention": {**YARN, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = read_family("olmo3", rope_parameters=ropes)
    assert [(rope.kind, rope.theta) for rope in config.ropes] == [("default", 1e4)] * 3 + [("yarn", 1e6)]


def test_olmoe_has_experts_and_norms_before():
    config = read_family("olmoe", num_experts=64, num_experts_per_tok=8)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_used, config.experts.intermediate_size) == (64, 8, 96)
    assert (config.experts.renormalises, config.norm_after, config.qk_norm_whole) == (False, False, True)
    with pytest.raises(ModelError, match="clip_qkv: is not supported"):
        read_family("olmoe", clip_qkv=8.0)

"""Mellum's layers: windows, ropes and MLPs by type."""

from __future__ import annotations

import pytest

from model.config_fields import NO_WINDOW
from model.errors import ModelError
from model.weights.name_spelling import find_spelling
from tests.support.family_configs import read_family

TYPES = ["sliding_attention", "full_attention"] * 2


def test_each_type_of_layer_has_its_rope():
    config = read_family("mellum", layer_types=TYPES, sliding_window=16)
    assert config.windows == (16, NO_WINDOW) * 2
    assert [rope.theta for rope in config.ropes] == [1e4, 5e5] * 2
    ropes = {"full_attention": {"rope_theta": 3e5}, "sliding_attention": {"rope_theta": 2e4}}
    config = read_family("mellum", layer_types=TYPES, rope_parameters=ropes)
    assert [rope.theta for rope in config.ropes] == [2e4, 3e5] * 2
    assert read_family("mellum").windows == (NO_WINDOW,) * 4


def test_some_layers_have_a_dense_mlp():
    config = read_family("mellum", mlp_layer_types=["dense", "sparse", "sparse", "sparse"], num_experts=16)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.layers) == (16, (False, True, True, True))
    with pytest.raises(ModelError, match="mlp_layer_types: not 4 times one of dense, sparse"):
        read_family("mellum", mlp_layer_types=["moe"] * 4)


def test_layers_that_draft_are_left_out():
    spelling = find_spelling(["model.embed_tokens.weight"], read_family("mellum"))
    assert spelling.known("mtp.layers.0.input_layernorm.weight") is None

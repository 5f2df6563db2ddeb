"""Mixtral: Mistral's fields, experts everywhere, and names of its own."""

from __future__ import annotations

import pytest

from model.errors import ModelError
from model.presets import PRESETS
from model.weights.checkpoint import expected_shapes, is_projection
from tests.support.family_configs import read_family


def test_names_and_shapes_of_experts():
    config = read_family("mixtral", num_local_experts=3)
    shapes = expected_shapes(config)
    prefix = "model.layers.2.block_sparse_moe"
    assert shapes[f"{prefix}.gate.weight"] == (3, 64)
    assert shapes[f"{prefix}.experts.2.w1.weight"] == shapes[f"{prefix}.experts.2.w3.weight"] == (96, 64)
    assert shapes[f"{prefix}.experts.2.w2.weight"] == (64, 96)
    assert all(is_projection(f"{prefix}.experts.2.w{number}.weight") for number in (1, 2, 3))
    assert not any(".mlp." in name for name in shapes)


def test_the_best_experts_weights_sum_to_1():
    experts = read_family("mixtral").experts
    assert experts is not None
    assert experts.renormalises
    assert (experts.num_experts, experts.num_used, experts.layers) == (8, 2, (True,) * 4)


def test_rope_and_window():
    assert read_family("mixtral").rope.theta == 1e6
    assert set(read_family("mixtral", sliding_window=32).windows) == {32}


def test_parameters_of_the_published_shape():
    assert PRESETS["mixtral-8x7b"].num_parameters == 46_702_526_464  # 46.7 B
    assert round(PRESETS["mixtral-8x7b"].num_active_parameters / 1e9, 1) == 12.9


def test_more_experts_per_token_than_there_are():
    with pytest.raises(ModelError, match=r"num_experts_per_tok: 9 is outside 1\.\.8"):
        read_family("mixtral", num_experts_per_tok=9)

"""Granite's multipliers, experts, and Granite 4 without Mamba."""

from __future__ import annotations

import pytest

from model.errors import ModelError
from tests.support.family_configs import read_family


def test_multipliers_become_factors_of_the_residual_stream():
    config = read_family(
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.5,
        attention_multiplier=0.015625,
        logits_scaling=8,
        tie_word_embeddings=True,
    )
    assert (config.embedding_factor, config.residual_eps) == (24.0, pytest.approx(4e-5))
    assert (config.attention_scale, config.multipliers.logits_divisor) == (0.015625, 8.0)
    assert config.tied_embeddings
    assert not config.shares_embedding


def test_without_multipliers_scores_are_not_scaled():
    config = read_family("granite", tie_word_embeddings=True)
    assert (config.attention_scale, config.embedding_factor, config.shares_embedding) == (1.0, 1.0, True)
    assert read_family("llama").attention_scale == 16**-0.5


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "12"])
@pytest.mark.parametrize(
    "name", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
def test_other_multipliers_are_refused(name: str, value: object):
    with pytest.raises(ModelError, match=f"config.json: {name}: "):
        read_family("granite", **{name: value})


def test_experts_of_granite_3():
    config = read_family("granitemoe", num_local_experts=40, num_experts_per_tok=8, intermediate_size=48)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_used, config.experts.intermediate_size) == (40, 8, 48)
    assert config.experts.renormalises


def test_granite_4_rotates_if_its_field_says_so():
    config = read_family("granitemoehybrid", position_embedding_type="rope")
    assert (config.intermediate_size, config.experts, config.ropes[0].kind) == (80, None, "default")
    assert {rope.kind for rope in read_family("granitemoehybrid").ropes} == {"none"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_local_experts": 62}, "num_local_experts: experts next to a shared MLP are not supported"),
        ({"layer_types": ["attention", "mamba"] * 2}, "layer_types: layers without attention are not supported"),
        ({"layer_types": None}, "layer_types: layers without attention are not supported"),
        ({"layer_types": ["attention"]}, "layer_types: names 1 layers of 4"),
        ({"layer_types": [["attention"]] * 4}, "layer_types: layers without attention are not supported"),
    ],
)
def test_other_layers_of_granite_4_are_refused(fields: dict[str, object], problem: str):
    with pytest.raises(ModelError, match=problem):
        read_family("granitemoehybrid", **fields)

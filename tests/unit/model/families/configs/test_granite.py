"""Granite's multipliers."""

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

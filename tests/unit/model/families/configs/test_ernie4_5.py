"""ERNIE 4.5's biases, rope and head."""

from __future__ import annotations

from tests.support.family_configs import read_family


def test_one_field_gives_all_biases():
    config = read_family("ernie4_5", use_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)
    assert not read_family("ernie4_5").output_bias


def test_neighbours_rotate_and_embeddings_are_tied():
    config = read_family("ernie4_5")
    assert (config.rope.is_interleaved, config.rope.theta, config.tied_embeddings) == (True, 500000.0, True)
    assert not read_family("ernie4_5", tie_word_embeddings=False).tied_embeddings

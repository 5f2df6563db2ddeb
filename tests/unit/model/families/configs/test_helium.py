"""Helium's rope and biases."""

from __future__ import annotations

from tests.support.family_configs import read_family


def test_neighbours_rotate():
    config = read_family("helium")
    assert (config.rope.is_interleaved, config.rope.theta, config.head_dim) == (True, 1e5, 128)


def test_o_has_no_bias():
    config = read_family("helium", attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, True)

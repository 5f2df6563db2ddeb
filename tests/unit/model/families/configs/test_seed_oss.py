"""Seed-OSS's biases."""

from __future__ import annotations

from tests.support.family_configs import read_family


def test_each_bias_has_its_field():
    config = read_family("seed_oss")
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.head_dim) == (True, False, False, 128)
    config = read_family("seed_oss", attention_bias=False, attention_out_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, True, True)

"""InternLM 3's fields of biases, as published and as transformers writes them."""

from __future__ import annotations

import pytest

from tests.support.family_configs import read_family


@pytest.mark.parametrize(
    ("fields", "biases"),
    [
        ({}, (False, False, False)),
        ({"qkv_bias": True, "bias": False}, (True, False, False)),
        ({"qkv_bias": False, "bias": True}, (False, True, True)),
        ({"attention_bias": True, "mlp_bias": True, "architectures": ["LlamaForCausalLM"]}, (True, True, True)),
    ],
)
def test_biases(fields: dict[str, object], biases: tuple[bool, bool, bool]):
    config = read_family("internlm3", **fields)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases
    assert config.head_dim == 128

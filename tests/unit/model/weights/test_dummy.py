"""Random weights repeat one tile of numbers, wherever a read begins."""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig
from model.dtypes import NUMPY_DTYPES
from model.weights.dummy import RANDOM_TILE, DummyWeights
from tests.support.goldens import FOLDER


def test_dummy_weights_are_the_same_however_they_are_cut():
    config, dtype = ModelConfig.read(FOLDER / "qwen3_bf16"), NUMPY_DTYPES["float32"]
    source = DummyWeights(config, dtype)
    whole = np.empty(2 * RANDOM_TILE + 10, dtype)
    source.read_into("model.embed_tokens.weight", 0, whole)
    np.testing.assert_array_equal(whole[:RANDOM_TILE], whole[RANDOM_TILE : 2 * RANDOM_TILE])
    for start, length in ((5, 7), (RANDOM_TILE - 3, RANDOM_TILE + 8), (RANDOM_TILE, RANDOM_TILE)):
        part = np.empty(length, dtype)
        source.read_into("model.embed_tokens.weight", start, part)
        np.testing.assert_array_equal(part, whole[start : start + length])


def test_dummy_experts_and_layers_differ():
    """Equal ones would align the hidden states of all tokens, and with them their experts."""
    source = DummyWeights(ModelConfig.read(FOLDER / "qwen3_moe_bf16"), NUMPY_DTYPES["float32"])
    parts = {}
    for name in ("layers.0.mlp.gate", "layers.1.mlp.gate", "layers.0.mlp.experts.0.down_proj"):
        parts[name] = np.empty(64, np.float32)
        source.read_into(f"model.{name}.weight", 3, parts[name])
        rest = np.empty(60, np.float32)
        source.read_into(f"model.{name}.weight", 7, rest)
        np.testing.assert_array_equal(rest, parts[name][4:])
    first, *others = parts.values()
    assert all((first != other).mean() > 0.9 for other in others)

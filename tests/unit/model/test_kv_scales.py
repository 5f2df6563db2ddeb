"""Scales of an fp8 cache that are measured at load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.config import ModelConfig
from model.families.llama import Llama
from model.kv_scales import kv_format, measure_kv_scales
from model.ops.cpu.ops import NumpyOps
from model.ops.fp8 import widen
from model.ops.weight import Weight
from model.weights.loader import load_model
from tests.support.demo_engine import DEMO
from tests.support.paged import PagedSequences

UINT8 = np.dtype(np.uint8)


def demo_model() -> Llama:
    return load_model(DEMO, ModelConfig.read(DEMO), NumpyOps(kv_dtype=UINT8), 256)


@pytest.fixture(scope="module")
def model() -> Llama:
    return demo_model()


def with_values_times(model: Llama, factors: np.ndarray) -> Llama:
    """The first layer's v, each head times its factor."""
    first, *others = model.weights.layers
    config, data = model.config, first.qkv.data.copy()
    rows = data[-config.num_kv_heads * config.head_dim :].reshape(config.num_kv_heads, -1)
    rows *= factors[:, None].astype(np.float32)
    layers = (replace(first, qkv=Weight(data)), *others)
    scales = np.ones_like(model.weights.kv_scales)
    return Llama(config, model.ops, replace(model.weights, layers=layers, kv_scales=scales))


def test_the_same_scales_for_any_block_size(model):
    scales = [measure_kv_scales(model, block_size, 256) for block_size in (8, 16, 32)]
    np.testing.assert_array_equal(scales[0], scales[1])
    np.testing.assert_array_equal(scales[0], scales[2])
    np.testing.assert_array_equal(np.exp2(np.rint(np.log2(scales[0]))), scales[0])
    np.testing.assert_array_equal(model.weights.kv_scales, scales[0])


def test_text_uses_the_range(model):
    measure_kv_scales(model, 16, 256)
    pages = PagedSequences(model, 1, 256, 16)
    pages.forward([(0, np.arange(300, 500))])
    written = pages._kv[pages.tables[0, : 192 // 16]]
    largest = widen(written & 0x7F).max(axis=(0, 4, 5))
    assert 8 <= largest.min() <= largest.max() < 448


@pytest.mark.parametrize("factor", [2.0**-14, 2.0**-5, 8.0, 2.0**16])
def test_heads_far_from_one_are_found(model, factor: float):
    """Beyond what e4m3 holds with a scale of 1, too; each head has its own."""
    factors = np.array([factor, 1.0])
    known = measure_kv_scales(with_values_times(model, np.ones(2)), 16, 256)
    scales = measure_kv_scales(with_values_times(model, factors), 16, 256)
    np.testing.assert_array_equal(scales[0, 1], known[0, 1] * factors)


@pytest.mark.parametrize("factor", [0.0, np.nan])
def test_a_head_without_a_value_has_one(model, factor: float):
    assert measure_kv_scales(with_values_times(model, np.array([factor, 1.0])), 16, 256)[0, 1, 0] == 1


def test_a_short_table_is_enough():
    model = load_model(DEMO, ModelConfig.read(DEMO), NumpyOps(kv_dtype=UINT8), 16)
    assert np.isfinite(measure_kv_scales(model, 32, 16)).all()


def test_the_key_names_dtype_and_scales(model):
    first, again = kv_format(model, 16, 256), kv_format(demo_model(), 8, 256)
    assert first == again
    assert (first.dtype, first.scales) == ("fp8_e4m3", "measured")
    stored = Llama(model.config, model.ops, replace(model.weights, has_stored_kv_scales=True))
    assert kv_format(stored, 16, 256).scales == "stored"
    assert kv_format(stored, 16, 256).key == first.key
    model.weights.kv_scales[3, 1, 0] *= 2
    assert kv_format(stored, 16, 256).key != first.key
    wide = load_model(DEMO, model.config, NumpyOps(), 256)
    assert kv_format(wide, 16, 256).key == kv_format(wide, 16, 256).dtype == "float32"

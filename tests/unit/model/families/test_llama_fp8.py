"""The forward pass with weights in e4m3: which inputs are rounded, and that the rest is exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.families.llama import Layer, Llama
from model.ops.cpu.ops import NumpyOps
from model.ops.fp8 import widen
from model.ops.interface import Fp8Rows
from model.ops.weight import Weight, WeightFormat
from model.weights.online_fp8 import STAGING_BYTES, loaded_bytes
from tests.support.fp8_models import fp8_model, logits_of
from tests.support.goldens import relative_error

MATRICES = ("qkv", "output", "gate_up", "down")


class RecordingOps(NumpyOps):
    """Notes for each product the format of its weights and whether x was rounded."""

    def __init__(self, *, has_fp8: bool = True):
        super().__init__()
        self.has_fp8 = has_fp8
        self.products: list[tuple[WeightFormat, bool]] = []

    def linear(self, x, weight, bias=None, **how):
        self.products.append((weight.format, isinstance(x, Fp8Rows)))
        return super().linear(x, weight, bias, **how)


def dequantised(weight: Weight) -> Weight:
    return Weight(widen(weight.data) * weight.scale[:, None])


def with_layers(model: Llama, *layers: Layer) -> Llama:
    return Llama(model.config, model.ops, replace(model.weights, layers=layers))


def dense(layer: Layer) -> Layer:
    return replace(layer, **{name: dequantised(getattr(layer, name)) for name in MATRICES})


def test_without_fp8_units_weights_are_dequantised_and_inputs_kept():
    model = fp8_model(RecordingOps(has_fp8=False))
    logits = logits_of(model)
    assert set(model.ops.products) == {(WeightFormat.FP8, False), (WeightFormat.DENSE, False)}
    exact = logits_of(with_layers(model, *map(dense, model.weights.layers)))
    np.testing.assert_allclose(logits, exact, atol=1e-4)


def test_with_fp8_units_every_input_of_a_layer_is_rounded():
    model = fp8_model(RecordingOps())
    logits = logits_of(model, (20,))
    assert model.ops.products == [(WeightFormat.FP8, True)] * 4 * len(model.weights.layers) + [
        (WeightFormat.DENSE, False)
    ]
    exact = logits_of(with_layers(model, *map(dense, model.weights.layers)), (20,))
    assert 1e-3 < relative_error(logits, exact) < 0.1


@pytest.mark.parametrize("dense_at", [0, 1])
def test_a_dense_layer_among_quantised_ones_keeps_its_inputs(dense_at):
    model = fp8_model(RecordingOps())
    layers = list(model.weights.layers[:2])
    layers[dense_at] = dense(layers[dense_at])
    mixed = with_layers(model, *layers)
    assert np.isfinite(logits_of(mixed, (20,))).all()
    of_layer = [(WeightFormat.FP8, True)] * 4, [(WeightFormat.DENSE, False)] * 4
    expected = of_layer[dense_at == 0] + of_layer[dense_at == 1] + [(WeightFormat.DENSE, False)]
    assert model.ops.products == expected
    assert len(mixed.first_layer().weights.layers) == 2


def test_matrices_are_rounded_row_by_row_in_any_number_of_pieces(monkeypatch):
    whole = fp8_model(NumpyOps()).weights
    monkeypatch.setattr("model.weights.online_fp8.STAGING_BYTES", 1)
    for layer, other in zip(whole.layers, fp8_model(NumpyOps()).weights.layers, strict=True):
        for name in MATRICES:
            matrix, again = getattr(layer, name), getattr(other, name)
            assert matrix.format is WeightFormat.FP8
            np.testing.assert_array_equal(matrix.data, again.data)
            np.testing.assert_array_equal(matrix.scale, again.scale)
    assert STAGING_BYTES > 1


def test_loaded_bytes_is_what_is_loaded():
    model = fp8_model(NumpyOps())
    tables = model.weights.table_bytes
    float32 = np.dtype(np.float32)
    assert model.weights.num_bytes == sum(loaded_bytes(model.config, float32, "fp8").values()) + tables
    assert sum(loaded_bytes(model.config, float32, "auto").values()) > sum(
        loaded_bytes(model.config, float32, "fp8").values()
    )

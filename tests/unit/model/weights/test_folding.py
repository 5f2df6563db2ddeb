"""Differences of families that are folded into weights during reading."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.weight import WeightFormat
from model.weights.checkpoint import EMBEDDING, FINAL_NORM, LM_HEAD, expected_shapes
from model.weights.folding import folded, row_orders
from model.weights.formats.stored_matrix import StoredMatrix, WeightForm
from tests.support.family_configs import read_family

PARTIAL = read_family("phi3", partial_rotary_factor=0.75)
QKV = "model.layers.2.self_attn.qkv_proj.weight"
HEAD = [*range(6), 12, 13, *range(6, 12), 14, 15]
"""Order of a head of 16 of which 12 rotate: pairs (i, i + 6) come to lie 8 apart."""


class ArraySource:
    """Tensors of consecutive numbers; matrices of `form` if one is given."""

    def __init__(self, config: ModelConfig, form: WeightForm | None = None):
        self.shapes = expected_shapes(config)
        self.form = form

    def values(self, name: str) -> np.ndarray:
        return np.arange(np.prod(self.shapes[name]), dtype=np.float32)

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        out[...] = self.values(name)[start : start + out.size]

    def matrix(self, name: str) -> StoredMatrix | None:
        if self.form is None:
            return None
        sizes = {key: int(np.prod(shape)) for key, (shape, _) in self.form.arrays(*self.shapes[name]).items()}
        arrays = {key: Numbers(np.arange(size) % 256) for key, size in sizes.items()}
        return StoredMatrix(name, self.shapes[name], self.form, arrays)

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        return ModelError(f"{name} {dtype}")


class Numbers:
    def __init__(self, values: np.ndarray):
        self.values = values

    def read_into(self, start: int, out: np.ndarray) -> None:
        out[...] = self.values[start : start + out.size]


def expected_order() -> np.ndarray:
    rotated = [head * 16 + row for head in range(6) for row in HEAD]
    return np.array([*rotated, *range(96, 128)])


def test_a_family_without_differences_reads_its_source():
    source = ArraySource(read_family("llama"))
    assert folded(source, read_family("llama")) is source


@pytest.mark.parametrize("piece", [1, 63, 64, 1000, 128 * 64])
def test_rows_of_partial_heads_are_read_in_order_in_any_pieces(piece: int):
    source = ArraySource(PARTIAL)
    out = np.empty(128 * 64, np.float32)
    for start in range(0, out.size, piece):
        folded(source, PARTIAL).read_into(QKV, start, out[start : start + piece])
    np.testing.assert_array_equal(out.reshape(128, 64), source.values(QKV).reshape(128, 64)[expected_order()])


@pytest.mark.parametrize(
    ("fraction", "head"),
    [(1.0, [*range(0, 16, 2), *range(1, 16, 2)]), (0.5, [0, 2, 4, 6, *range(8, 12), 1, 3, 5, 7, *range(12, 16)])],
)
def test_neighbours_that_rotate_come_to_lie_half_a_head_apart(fraction: float, head: list[int]):
    llama = read_family("llama")
    rope = replace(llama.rope, rotary_fraction=fraction, is_interleaved=True)
    orders = row_orders(replace(llama, rope=rope))
    np.testing.assert_array_equal(orders["self_attn.k_proj"], [*head, *(16 + row for row in head)])
    np.testing.assert_array_equal(orders["self_attn.v_proj"], np.arange(32))


def test_modules_of_their_own_are_ordered_apart():
    llama = read_family("llama")
    config = replace(llama, rope=replace(llama.rope, rotary_fraction=0.75), qkv_bias=True)
    source, out = ArraySource(config), np.empty(32, np.float32)
    folded(source, config).read_into("model.layers.0.self_attn.k_proj.bias", 0, out)
    np.testing.assert_array_equal(out, [*HEAD, *(16 + row for row in HEAD)])
    folded(source, config).read_into("model.layers.0.self_attn.v_proj.bias", 0, out)
    np.testing.assert_array_equal(out, range(32))


@pytest.mark.parametrize(
    ("form", "widths"),
    [
        (WeightForm(WeightFormat.FP8), {"data": 64, "scale": 1}),
        (WeightForm(WeightFormat.INT4, group_size=32, has_zero_point=True), {"data": 32, "scale": 2, "zero_point": 2}),
    ],
)
def test_quantised_rows_keep_their_scales(form: WeightForm, widths: dict[str, int]):
    matrix = folded(ArraySource(PARTIAL, form), PARTIAL).matrix(QKV)
    assert matrix is not None
    assert set(matrix.arrays) == set(widths)
    for name, width in widths.items():
        out = np.empty(128 * width, np.int64)
        matrix.arrays[name].read_into(0, out)
        plain = np.arange(128 * width).reshape(128, width) % 256
        np.testing.assert_array_equal(out.reshape(128, width), plain[expected_order()])


def test_blocks_that_an_order_would_mix_are_refused():
    form = WeightForm(WeightFormat.FP8_BLOCK)
    within = folded(ArraySource(PARTIAL, form), PARTIAL)
    assert within.matrix(QKV) is not None, "128 rows are one block"
    wide = replace(PARTIAL, num_heads=12, num_kv_heads=2, head_dim=96)
    with pytest.raises(ModelError, match="a rope of part of a head needs heads of 128 rows in fp8 blocks"):
        folded(ArraySource(wide, form), wide).matrix(QKV)


def test_factors_of_embedding_norm_and_head():
    fields = {"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
    config = read_family("granite", tie_word_embeddings=True, **fields)
    source = ArraySource(config)
    for name, factor in ((EMBEDDING, 24.0), (FINAL_NORM, 0.25), ("model.layers.0.input_layernorm.weight", 1.0)):
        out = np.empty(10, np.float32)
        folded(source, config).read_into(name, 3, out)
        np.testing.assert_array_equal(out, np.arange(3, 13) * factor)
    folded(source, config).read_into(LM_HEAD, 3, out)
    np.testing.assert_array_equal(out, np.arange(3, 13), "the head of tied embeddings, without their factor")

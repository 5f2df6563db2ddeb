"""Kernels of products with 8-bit weights and 16-bit inputs, by device and rows. No GPU is needed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from model.ops.weight import Weight, WeightFormat
from tests.support.fake_launcher import ADDRESS, FakeArray, FakeLauncher

w8 = pytest.importorskip("model.ops.gpu.w8.linear", reason="needs the packages of the cuda extra", exc_type=ImportError)

FORMATS = [WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8]


def weight_of(kind, n=4096, k=4096, *, quantised_input=False):
    data = FakeArray((n, k), np.int8 if kind is WeightFormat.INT8 else np.uint8)
    return Weight(data, kind, FakeArray((n,), np.float32), quantised_input=quantised_input)


def launched_for(m, kind=WeightFormat.INT8, n=4096, k=4096, address=ADDRESS, **device):
    ops = FakeLauncher(**device)
    linear = w8.W8Linear(ops, ops.dense)
    linear(FakeArray((m, k), ops.dtype, address), weight_of(kind, n, k), None, FakeArray((m, n), ops.dtype))
    return ops.launched


@pytest.mark.parametrize("kind", FORMATS)
def test_on_hopper_weights_are_widened_in_registers_up_to_384_rows(kind):
    assert launched_for(16, kind) == ["gemv_w8"]
    assert launched_for(17, kind) == launched_for(192, kind) == ["small_m_w8a16_sm90"]
    assert launched_for(193, kind) == ["small_m_w8a16_sm90"] * 2
    assert launched_for(384, kind) == ["small_m_w8a16_sm90"] * 2
    assert launched_for(385, kind) == ["dequantise_rows", "linear"]


@pytest.mark.parametrize("arch", ["80", "86", "89", "120"])
def test_elsewhere_up_to_16_rows_are(arch):
    assert launched_for(16, arch=arch, max_shared_bytes=99 << 10) == ["gemv_w8"]
    assert launched_for(17, arch=arch) == ["dequantise_rows", "linear"]


@pytest.mark.parametrize("odd", [{"k": 4104}, {"address": ADDRESS + 8}, {"dtype": np.float32}])
@pytest.mark.parametrize("m", [1, 100])
def test_what_the_kernels_cannot_take_is_dequantised(odd, m):
    assert launched_for(m, **odd) == ["dequantise_rows", "linear"]


@pytest.mark.parametrize("num_rows", [1, 192, 193, 256, 384, 385, 768])
def test_pieces_are_all_rows_in_about_equal_parts(num_rows):
    sizes = [part.stop - part.start for part in w8.pieces(num_rows)]
    assert sum(sizes) == num_rows
    assert max(sizes) <= w8.MAX_W8A16_ROWS
    assert len(sizes) == -(-num_rows // w8.MAX_W8A16_ROWS)


def test_the_log_states_once_that_inputs_of_int8_weights_are_not_rounded(caplog):
    linear = w8.W8Linear(FakeLauncher(), None)
    weight = weight_of(WeightFormat.INT8, quantised_input=True)
    with caplog.at_level("INFO"):
        assert linear.prepare(weight) is weight
        linear.prepare(weight)
        linear.prepare(dataclasses.replace(weight, quantised_input=False))
    assert caplog.messages == ["int8 weights: inputs stay in bfloat16 (W8A16), more exact than rounded to int8"]

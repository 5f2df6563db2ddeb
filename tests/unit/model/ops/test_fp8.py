import ml_dtypes
import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.fp8 import E4M3, narrow, quantise, widen
from model.ops.interface import Fp8Rows
from tests.support.fp8_checks import as_weight, assert_product, random_rows

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_the_largest_of_a_row_becomes_the_largest_number():
    x = np.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-30, 0.0, 0.0]], np.float32)
    data, scale = quantise(x)
    np.testing.assert_array_equal(widen(data)[0], [224, -448, 112])
    np.testing.assert_array_equal(widen(data)[1:], 0)
    np.testing.assert_array_equal(scale, np.array([2 / 448, 1e-12, 1e-12], np.float32))


def test_what_was_rounded_is_near_what_it_was():
    x = np.random.default_rng(1).standard_normal((50, 333), np.float32)
    data, scale = quantise(x)
    error = np.abs(widen(data) * scale[:, None] - x)
    # half of the last of three bits, or half of the smallest number
    assert (error <= np.maximum(np.abs(x) * 2.0**-4, scale[:, None] * 2.0**-10) * 1.001).all()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_number_breaks_its_row_alone(broken):
    x = np.ones((3, 5), np.float32)
    x[1, 2] = broken
    data, scale = quantise(x)
    np.testing.assert_array_equal(np.isfinite(scale), [True, False, True])
    assert np.isfinite(widen(data)[[0, 2]]).all()


def test_all_codes_are_widened():
    codes = np.arange(256, dtype=np.uint8)
    wide = widen(codes)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(wide)), [0x7F, 0xFF])
    np.testing.assert_array_equal(wide[[0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE]], [0, 2**-9, 2**-6, 1, 448, -448])
    np.testing.assert_array_equal(wide.astype(E4M3).view(np.uint8)[~np.isnan(wide)], codes[~np.isnan(wide)])


def test_narrow_rounds_to_nearest_even_and_saturates():
    codes = np.arange(0x7E, dtype=np.uint8)
    low, high = widen(codes), widen(codes + 1)
    middle = (low + high) / 2
    np.testing.assert_array_equal(narrow(middle), codes + codes % 2)  # ties to the even code
    for sign, bit in ((1, 0), (-1, 0x80)):
        np.testing.assert_array_equal(narrow(sign * np.nextafter(middle, np.float32(0)))[1:], (codes | bit)[1:])
        np.testing.assert_array_equal(narrow(sign * np.nextafter(middle, high)), (codes + 1) | bit)
    x = np.array([449, -1e9, np.inf, -np.inf, np.nan, -np.nan, -0.0], np.float32)
    np.testing.assert_array_equal(narrow(x), [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F, 0x80])


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_that_of_the_numbers(with_bias):
    rng, ops = np.random.default_rng(2), NumpyOps(BFLOAT16)
    weight = random_rows(rng, 300, 128)
    bias = rng.standard_normal(300).astype(BFLOAT16) if with_bias else None
    for x in (random_rows(rng, 7, 128), rng.standard_normal((7, 128)).astype(BFLOAT16)):
        assert_product(ops.linear(x, as_weight(weight), bias), x, weight, bias)
        out = np.full((7, 300), np.nan, np.float32)
        assert ops.linear(x, as_weight(weight), bias, out=out) is out
        assert_product(out, x, weight, bias, tolerance=1e-6)


def test_the_fused_ones_are_the_two_after_each_other():
    rng, ops = np.random.default_rng(3), NumpyOps(BFLOAT16)
    x, residual = (rng.standard_normal((4, 64)).astype(BFLOAT16) for _ in range(2))
    weight, twice = rng.standard_normal(64).astype(BFLOAT16), residual.copy()
    fused = ops.add_rms_norm_quantised(x, residual, weight, 1e-5)
    apart = ops.quantise_rows(ops.add_rms_norm(x, twice, weight, 1e-5))
    np.testing.assert_array_equal(fused.data, apart.data)
    np.testing.assert_array_equal(fused.scale, apart.scale)
    np.testing.assert_array_equal(residual, twice)


def test_rows_come_back_from_e4m3():
    rows = random_rows(np.random.default_rng(4), 5, 48)
    back = NumpyOps(np.dtype(np.float32)).dequantise_rows(rows)
    np.testing.assert_array_equal(back, widen(rows.data) * rows.scale[:, None])
    assert isinstance(rows, Fp8Rows)


def test_a_product_of_the_reference():
    rng = np.random.default_rng(0)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    weight, bias = random_rows(rng, 300, 128), rng.standard_normal(300).astype(bfloat16)
    for x in (random_rows(rng, 7, 128), rng.standard_normal((7, 128)).astype(bfloat16)):
        assert_product(NumpyOps(bfloat16).linear(x, as_weight(weight), bias), x, weight, bias)

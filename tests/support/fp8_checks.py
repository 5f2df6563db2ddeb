"""e4m3 matrices for tests, and their values in float64."""

from __future__ import annotations

import numpy as np

from model.ops.fp8 import quantise, widen
from model.ops.interface import Fp8Rows
from model.ops.weight import Weight
from tests.support.kernel_checks import NUM_DRAWN, repeated


def random_rows(rng: np.random.Generator, num_rows: int, width: int) -> Fp8Rows:
    """Return rows whose scales differ by about a factor of ten and whose products are near one."""
    sizes = width**-0.25 * np.exp(0.7 * rng.standard_normal((num_rows, 1), np.float32))
    return Fp8Rows(*quantise(rng.standard_normal((num_rows, width), np.float32) * sizes))


def repeated_rows(rng: np.random.Generator, num_rows: int, width: int) -> Fp8Rows:
    """Return `random_rows`, NUM_DRAWN of them repeated, for a timing."""
    rows = random_rows(rng, min(num_rows, NUM_DRAWN), width)
    return Fp8Rows(repeated(rows.data, num_rows, width), repeated(rows.scale, num_rows))


def upload(ops, x):
    """Return a copy of an array, or of e4m3 rows, on the device of `ops`."""
    return Fp8Rows(ops.upload(x.data), ops.upload(x.scale)) if isinstance(x, Fp8Rows) else ops.upload(x)


def as_weight(rows: Fp8Rows) -> Weight:
    return Weight.fp8(rows.data, rows.scale)


def download(ops, x: Fp8Rows) -> Fp8Rows:
    return Fp8Rows(ops.download(x.data), ops.download(x.scale))


def in_float64(x) -> np.ndarray:
    if isinstance(x, Fp8Rows):
        return widen(x.data).astype(np.float64) * x.scale[:, None]
    return x.astype(np.float64)


def assert_product(actual: np.ndarray, x, weight: Fp8Rows, bias: np.ndarray | None, tolerance: float = 5e-3) -> None:
    """Compare each row with float64 by norm; NaN and infinity never pass.

    Rounding to bfloat16 gives 1.7e-3. Hopper's tensor cores add e4m3 products in about 14 bits: over K = 14,336 that
    gives up to 3.1e-3 in a row.
    """
    expected = in_float64(x) @ in_float64(weight).T
    if bias is not None:
        expected += bias.astype(np.float64)
    assert actual.shape == expected.shape
    got = actual.astype(np.float64)
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} of {got.size} elements are not finite"
    wrong = np.linalg.norm(got - expected, axis=1)
    size = np.linalg.norm(expected, axis=1)
    if expected.shape[1] < 64:  # too few columns for the norm of each row to say much
        wrong, size = np.linalg.norm(wrong, keepdims=True), np.linalg.norm(size, keepdims=True)
    error = (wrong / np.maximum(size, 1e-30)).max()
    assert error <= tolerance, f"relative error {error:.2e}"


def assert_same_rows(actual: Fp8Rows, expected: Fp8Rows) -> None:
    """Compare bits, but not those of NaN."""
    np.testing.assert_array_equal(actual.scale, expected.scale)
    np.testing.assert_array_equal(widen(actual.data), widen(expected.data))


def assert_near_rows(actual: Fp8Rows, expected: Fp8Rows) -> None:
    """Compare rows, allowing few different roundings to e4m3: their inputs may differ in the last bits."""
    np.testing.assert_allclose(actual.scale, expected.scale, rtol=2.0**-7)
    differing = np.count_nonzero(actual.data != expected.data)
    assert differing <= 1 + 0.02 * actual.data.size, f"{differing} of {actual.data.size} differ"
    got, wanted = in_float64(actual), in_float64(expected)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)

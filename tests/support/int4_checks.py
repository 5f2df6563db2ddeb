"""4-bit weights for tests, and their values in float64."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from model.ops.weight import Weight, WeightFormat

SCALE_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def random_int4(
    rng: np.random.Generator,
    shape: tuple[int, int],
    group_size: int,
    *,
    has_zeros: bool = False,
    scales: str = "bfloat16",
    is_ordered: bool = False,
) -> Weight:
    """Return an INT4 weight whose products with rows of values near one are near one."""
    n, k = shape
    sizes = 0.2 * k**-0.5 * np.exp(0.5 * rng.standard_normal((n, k // group_size)))
    return Weight(
        rng.integers(0, 256, (n, k // 2), np.uint8),
        WeightFormat.INT4,
        scale=sizes.astype(SCALE_DTYPES[scales]),
        zero_point=rng.integers(0, 16, sizes.shape, np.uint8) if has_zeros else None,
        group_size=group_size,
        input_order=rng.permutation(k).astype(np.int32) if is_ordered else None,
    )


def upload_int4(ops, weight: Weight) -> Weight:
    """Return a copy on the device of `ops`, in the files' layout."""
    arrays = ("data", "scale", "zero_point", "input_order")
    there = {name: None if getattr(weight, name) is None else ops.upload(getattr(weight, name)) for name in arrays}
    return replace(weight, **there)


def in_float64(weight: Weight) -> np.ndarray:
    """Return an INT4 weight's matrix [N, K], columns in the order of the inputs."""
    n, k = weight.shape
    codes = np.stack([weight.data & 15, weight.data >> 4], axis=2).reshape(n, -1, weight.group_size).astype(np.float64)
    zero = 8 if weight.zero_point is None else weight.zero_point[:, :, None]
    values = ((codes - zero) * weight.scale[:, :, None].astype(np.float64)).reshape(n, k)
    if weight.input_order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, weight.input_order] = values
    return ordered


def assert_product(actual: np.ndarray, x: np.ndarray, matrix: np.ndarray, bias: np.ndarray | None, tolerance: float):
    """Compare each row (narrow ones together) with float64 by norm; NaN and infinity never pass."""
    expected = x.astype(np.float64) @ matrix.T
    if bias is not None:
        expected += bias.astype(np.float64)
    got = actual.astype(np.float64)
    assert got.shape == expected.shape
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} of {got.size} elements are not finite"
    wrong, size = np.linalg.norm(got - expected, axis=1), np.linalg.norm(expected, axis=1)
    if expected.shape[1] < 64:  # too few columns for the norm of each row to say much
        wrong, size = np.linalg.norm(wrong, keepdims=True), np.linalg.norm(size, keepdims=True)
    error = (wrong / np.maximum(size, 1e-30)).max()
    assert error <= tolerance, f"relative error {error:.2e}"

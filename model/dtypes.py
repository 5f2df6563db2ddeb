"""Element types by name, as in settings and configs."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NUMPY_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def all_finite(array: np.ndarray) -> bool:
    """Return whether a contiguous float32, float16, bfloat16 or e4m3 array has no NaN or infinity.

    Compares bits: non-finite values are the largest integers of either sign.
    """
    bits = array.reshape(-1).view(f"i{array.dtype.itemsize}")
    return all(_no_exponent_of_ones(bits[start : start + _PIECE], array.dtype) for start in range(0, bits.size, _PIECE))


def _no_exponent_of_ones(bits: np.ndarray, dtype: np.dtype) -> bool:
    exponent = _EXPONENT_BITS[dtype.name]
    sign = 1 << (8 * dtype.itemsize - 1)
    return int(bits.max()) < exponent and int(bits.view(f"u{dtype.itemsize}").max()) < sign | exponent


_EXPONENT_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3fn": 0x7F}
"""Least non-finite bits without the sign; e4m3 has only NaN."""
_PIECE = 1 << 20  # fits the cache

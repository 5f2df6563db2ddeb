"""Element types by their names in settings and configs."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NUMPY_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


BFLOAT16 = NUMPY_DTYPES["bfloat16"]


def widened(array: np.ndarray) -> np.ndarray:
    """Return floats as float32. bfloat16 is shifted, many times faster than its type's own cast."""
    if array.dtype != BFLOAT16:
        return array.astype(np.float32, copy=False)
    bits = array.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return finite float32 in `dtype`, rounded to nearest even; infinity where that overflows."""
    if dtype != BFLOAT16:
        return array.astype(dtype, copy=False)
    bits = array.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    return odd.astype(np.uint16).view(BFLOAT16)


def all_finite(array: np.ndarray) -> bool:
    """Return whether a contiguous float32, float16 or bfloat16 array has no NaN or infinity.

    Compares bits: an exponent of all ones is the largest integer of either sign.
    """
    bits = array.reshape(-1).view(f"i{array.dtype.itemsize}")
    return all(_no_exponent_of_ones(bits[start : start + _PIECE], array.dtype) for start in range(0, bits.size, _PIECE))


def _no_exponent_of_ones(bits: np.ndarray, dtype: np.dtype) -> bool:
    exponent = _EXPONENT_BITS[dtype.name]
    sign = 1 << (8 * dtype.itemsize - 1)
    return int(bits.max()) < exponent and int(bits.view(f"u{dtype.itemsize}").max()) < sign | exponent


_EXPONENT_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
_PIECE = 1 << 20  # fits the cache

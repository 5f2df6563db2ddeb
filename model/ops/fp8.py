"""e4m3 without infinities: NaN is 0x7f or 0xff, the maximum 448."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = np.float32(448)

MIN_SCALE = np.float32(1e-12)
"""MIN_SCALE of cuda/common/fp8.cuh."""


@np.errstate(invalid="ignore")
def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[T, K] -> (e4m3 as uint8[T, K], scale float32[T]) with x about data * scale.

    A row with NaN or infinity has a non-finite scale.
    """
    largest = np.abs(x).max(axis=1, initial=0)
    scale = np.maximum(largest / E4M3_MAX, MIN_SCALE)
    return (x * (np.float32(1) / scale)[:, None]).astype(E4M3).view(np.uint8), scale


def widen(data: np.ndarray) -> np.ndarray:
    """uint8[...], e4m3 bits -> float32, exactly."""
    values: np.ndarray = data.view(E4M3).astype(np.float32)
    return values


@np.errstate(invalid="ignore")
def narrow(x: np.ndarray) -> np.ndarray:
    """float32[...] -> e4m3 bits as uint8[...], to nearest even; saturates at 448, NaN is 0x7F."""
    bits: np.ndarray = np.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3).view(np.uint8)
    bits[np.isnan(x)] = 0x7F
    return bits

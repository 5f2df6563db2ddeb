"""The specification of products with quantised weights: exact arithmetic on the dequantised weights, in float32."""

from __future__ import annotations

import numpy as np

from model.errors import ModelError
from model.ops.fp8 import widen
from model.ops.interface import Array, Fp8Rows
from model.ops.weight import Weight, WeightFormat


class UnsupportedFormat(ModelError):
    """A backend has no product for a weight format."""


def linear_quantised(x: Array | Fp8Rows, weight: Weight) -> np.ndarray:
    """Return x [T, K] @ weight [N, K].T as float32[T, N]. x in e4m3 is used as it was rounded.

    Raises UnsupportedFormat.
    """
    if weight.format is not WeightFormat.FP8:
        raise UnsupportedFormat(f"linear: weights in {weight.format} are not supported on a CPU (dense, fp8)")
    if isinstance(x, Fp8Rows):
        product = widen(x.data) @ widen(weight.data).T * x.scale[:, None]
    else:
        product = x.astype(np.float32, copy=False) @ widen(weight.data).T
    return product * weight.scale

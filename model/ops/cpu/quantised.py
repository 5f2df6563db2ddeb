"""Specification of products with quantised weights, in float32."""

from __future__ import annotations

import numpy as np

from model.ops.fp8 import E4M3, MIN_SCALE, widen
from model.ops.interface import Array, Fp8Rows
from model.ops.weight import Weight, WeightFormat

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
BLOCK = 128
"""Side of an FP8_BLOCK block."""


INT8_MAX = np.float32(127)
PIECE_ELEMENTS = 1 << 17
"""Weights widened at once: as float64 they fit a core's cache."""

_E4M3_VALUES = {dtype: np.arange(256, dtype=np.uint8).view(E4M3).astype(dtype) for dtype in (FLOAT32, FLOAT64)}


def linear_quantised(x: Array | Fp8Rows, weight: Weight) -> np.ndarray:
    """Return x [T, K] @ weight [N, K].T as float32[T, N].

    INT8 with `quantised_input` rounds each row of x to int8. 8-bit inputs are summed in float64, which is exact except
    for FP8_BLOCK: a last bit that depends on the number of rows could change how the next input is rounded.
    """
    num_outputs, num_inputs = weight.shape
    if isinstance(x, Fp8Rows):
        rows, row_scale = widen(x.data), x.scale[:, None]
    elif weight.format is WeightFormat.INT8 and weight.quantised_input:
        rows, row_scale = quantise_int8(x.astype(FLOAT32, copy=False))
    else:
        rows, row_scale = x.astype(FLOAT32, copy=False), None
    if weight.input_order is not None:
        rows = rows[:, weight.input_order]
    dtype = FLOAT32 if row_scale is None else FLOAT64
    rows = rows.astype(dtype, copy=False)
    product = np.empty((len(rows), num_outputs), FLOAT32)
    step = max(BLOCK, PIECE_ELEMENTS // num_inputs // BLOCK * BLOCK)
    for first in range(0, num_outputs, step):
        last = min(first + step, num_outputs)
        product[:, first:last] = rows @ _codes(weight, first, last, dtype).T
    if row_scale is not None:
        product *= row_scale
    if weight.format in (WeightFormat.FP8, WeightFormat.INT8):
        product *= np.asarray(weight.scale)
    return product


def dequantise(weight: Weight) -> np.ndarray:
    """Return float32[N, K], with columns in the inputs' order."""
    values = _codes(weight, 0, weight.shape[0], FLOAT32)
    if weight.format in (WeightFormat.FP8, WeightFormat.INT8):
        values *= np.asarray(weight.scale)[:, None]
    if weight.input_order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, weight.input_order] = values
    return ordered


def quantise_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[T, K] -> (integers as float32[T, K], scale float32[T, 1])."""
    scale = np.maximum(np.abs(x).max(axis=1, initial=0) / INT8_MAX, MIN_SCALE)[:, None]
    return np.rint(x / scale), scale


def _codes(weight: Weight, first: int, last: int, dtype: np.dtype) -> np.ndarray:
    """Return rows first..last - 1 without row scales; `first` is a multiple of BLOCK."""
    data: np.ndarray = weight.data[first:last]
    if weight.format in (WeightFormat.DENSE, WeightFormat.INT8):
        return data.astype(dtype)
    if weight.format is WeightFormat.INT4:
        return _grouped(data, weight, slice(first, last))
    values = np.take(_E4M3_VALUES[dtype], data)
    if weight.format is WeightFormat.FP8_BLOCK:
        blocks = np.asarray(weight.scale)[first // BLOCK : -(-last // BLOCK)]
        values *= blocks.repeat(BLOCK, axis=0)[: len(data)].repeat(BLOCK, axis=1)[:, : data.shape[1]]
    return values


def _grouped(data: np.ndarray, weight: Weight, rows: slice) -> np.ndarray:
    codes = np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1, weight.group_size).astype(FLOAT32)
    codes -= np.float32(8) if weight.zero_point is None else weight.zero_point[rows, :, None].astype(FLOAT32)
    codes *= np.asarray(weight.scale)[rows, :, None].astype(FLOAT32)
    return codes.reshape(len(data), -1)

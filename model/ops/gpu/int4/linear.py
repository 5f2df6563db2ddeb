"""Launches the kernels for 4-bit weights. `ops` is the `CudaOps` in use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from model.ops.gpu.device import THREADS, expect
from model.ops.gpu.int4.builds import (
    GemvW4Build,
    Int4Layout,
    SmallMW4Build,
    gemv_w4_build,
    small_m_w4_build,
)
from model.ops.int4 import SPAN, SPAN_BYTES, TILE_ROWS
from model.ops.interface import Array
from model.ops.weight import Weight, WeightFormat

RowNorm = tuple[Array, Array, float]
"""(residual [1, K], norm [K], eps)."""

DenseLinear = Callable[[Array, Array, "Array | None", Array], None]
"""Takes x, weight [N, K], bias or None, out."""

MAX_GEMV_ROWS = 8
"""Most rows of x for which gemv_w4a16 beats small_m_w4a16_sm90 (H200)."""

MAX_FUSED_ROWS = 2048
"""Most rows of x for which unpacking in registers beats a 16-bit product (H200, layers of Llama-3.1-8B)."""

_FLOAT32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)
_INT32 = np.dtype(np.int32)
_UNPACK_WARPS = 8  # WARPS of unpack_int4.cu
_ALIGNMENT = 16
_COLS_STEP = 32  # step of builds' rows of x
_TILE_COLUMNS = 64
_NORM_VEC = 8  # elements of a row per thread that normalises


def layout_of(weight: Weight) -> Int4Layout:
    groups, scale = max(1, SPAN // weight.group_size), _scale(weight)
    return Int4Layout(groups, weight.zero_point is not None, scale.dtype != np.float16)


def expect_int4(weight: Weight) -> None:
    """Raise ValueError unless the arrays make an INT4_TILED weight."""
    (n, k), scale = weight.shape, _scale(weight)
    expect("weight.data", weight.data, _UINT8, k // SPAN, n // TILE_ROWS, SPAN_BYTES)
    expect("weight.scale", scale, scale.dtype, k // weight.group_size, n // TILE_ROWS, TILE_ROWS)
    if weight.zero_point is not None:
        expect("weight.zero_point", weight.zero_point, _UINT8, *scale.shape)
    if weight.input_order is not None:
        expect("weight.input_order", weight.input_order, _INT32, k)


class Int4Linear:
    def __init__(self, ops: Any, dense: DenseLinear):
        """`dense` computes products in the dtype of `ops`."""
        self._ops = ops
        self._dense = dense

    def __call__(self, x: Array, weight: Weight, bias: Array | None, out: Array, *, exact: bool = False) -> None:
        """Compute out [M, N] = x [M, K] @ weight [N, K].T + bias [N], C-contiguous and not empty. `exact`: use
        gemv_w4a16 if a build holds the rows, with the bits of one row."""
        ops, m = self._ops, len(out)
        if weight.input_order is not None:
            x = self._gather_columns(x, weight.input_order)
        is_fast = ops.dtype != _FLOAT32 and (x.data.ptr | out.data.ptr) % _ALIGNMENT == 0
        gemv = self.gemv_build(m, weight) if is_fast else None
        is_fused = is_fast and ops.arch == "90a" and m <= MAX_FUSED_ROWS
        small_m = self.small_m_build(m, weight) if is_fused else None
        if gemv is not None and (exact or small_m is None or m <= min(gemv.x_rows, MAX_GEMV_ROWS)):
            for rows in _pieces(m, gemv.x_rows):
                self.launch_gemv(gemv, x[rows], weight, bias, out[rows])
        elif small_m is not None:
            self.launch_small_m(small_m, x, weight, bias, out)
        else:
            self._dense(x, self.unpack(weight), bias, out)

    def can_norm(self, x: Array, residual: Array, weight: Weight) -> bool:
        """Return whether `add_norm` supports this row."""
        ops = self._ops
        if weight.format is not WeightFormat.INT4_TILED or len(x) != 1 or ops.dtype == _FLOAT32:
            return False
        is_aligned = (x.data.ptr | residual.data.ptr) % _ALIGNMENT == 0
        build = self.gemv_build(1, weight) if is_aligned and weight.input_order is None else None
        return build is not None and weight.shape[1] <= _NORM_VEC * 32 * build.warps

    def add_norm(
        self, sums: tuple[Array, Array], norm: tuple[Array, float], weight: Weight, bias: Array | None, out: Array
    ) -> None:
        """Implement `Ops.add_norm_linear` for one row that `can_norm` accepts; `sums` is (x, residual)."""
        (x, residual), build = sums, self.gemv_build(1, weight)
        if build is None:
            raise ValueError(f"add_norm: weights {weight.shape} are not supported")
        self.launch_gemv(build, x, weight, bias, out, norm=(residual, *norm))

    def gated(self, x: Array, weight: Weight, norm: RowNorm | None = None) -> Array | None:
        """Return silu_mul [M, I] of the product of x [M, K] and weight [2 I, K], or None if gemv_w4a16 does not support
        it.

        With `norm`, where `can_norm`, x is first added to the residual stream and normalised. The result has the bits
        of separate kernels.
        """
        ops, m, n = self._ops, len(x), weight.shape[0]
        is_fast = ops.dtype != _FLOAT32 and x.data.ptr % _ALIGNMENT == 0 and weight.input_order is None
        if not is_fast or not 0 < m <= MAX_GEMV_ROWS or n % (2 * TILE_ROWS):
            return None
        usual = self.gemv_build(m, weight)
        build = gemv_w4_build(m, *weight.shape, layout_of(weight), ops.num_sms, ops.max_shared_bytes, parts=2)
        if usual is None or build is None or min(usual.x_rows, build.x_rows) < m:
            return None
        out = ops.temporary((m, n // 2), ops.dtype)
        self.launch_gemv(build, x, weight, None, out, is_gated=True, norm=norm)
        return out

    def pack(self, weight: Weight) -> Weight:
        """Return an INT4 weight that `can_tile` as INT4_TILED, in the same memory: `weight` becomes invalid."""
        ops, (n, k) = self._ops, weight.shape
        groups = (k // weight.group_size, n // TILE_ROWS, TILE_ROWS)
        data = weight.data.reshape(k // SPAN, n // TILE_ROWS, SPAN_BYTES)
        scale = _scale(weight).reshape(groups)
        zero = None if weight.zero_point is None else weight.zero_point.reshape(groups)
        num_tasks = data.nbytes // 4 + scale.size
        with ops.scratch():
            sources = map(self._copied, (weight.data, weight.scale, weight.zero_point))
            args = (*sources, data, scale, zero, *map(np.int32, (n, k, groups[0])))
            ops.launch("pack_int4", (math.ceil(num_tasks / THREADS),), args)
        return replace(weight, data=data, format=WeightFormat.INT4_TILED, scale=scale, zero_point=zero)

    def unpack(self, weight: Weight) -> Array:
        """Return [N, K] in the dtype of `ops`, in the weight's column order."""
        ops, (n, k) = self._ops, weight.shape
        out = ops.temporary((n, k), ops.dtype)
        tiles = n // TILE_ROWS * (k // _TILE_COLUMNS)
        ops.launch(
            "unpack_int4",
            (math.ceil(tiles / _UNPACK_WARPS),),
            (weight.data, weight.scale, weight.zero_point, out, *map(np.int32, (n, k, weight.group_size))),
            threads=32 * _UNPACK_WARPS,
            overlaps=True,
            **layout_of(weight).defines,
        )
        return out

    def gemv_build(self, m: int, weight: Weight) -> GemvW4Build | None:
        ops = self._ops
        return gemv_w4_build(m, *weight.shape, layout_of(weight), ops.num_sms, ops.max_shared_bytes)

    def small_m_build(self, m: int, weight: Weight) -> SmallMW4Build | None:
        ops, rows = self._ops, math.ceil(m / _COLS_STEP) * _COLS_STEP
        return small_m_w4_build(rows, *weight.shape, layout_of(weight), ops.num_sms, ops.max_shared_bytes)

    def launch_gemv(
        self,
        build: GemvW4Build,
        x: Array,
        weight: Weight,
        bias: Array | None,
        out: Array,
        *,
        is_gated: bool = False,
        norm: RowNorm | None = None,
    ) -> None:
        """Multiply x, or with `norm`, where `can_norm`, the norm of residual + x, a sum that becomes the residual
        stream."""
        ops, (residual, norm_weight, eps) = self._ops, norm or (None, None, 0.0)
        row = x, residual, norm_weight, np.float32(eps)
        ops.launch(
            "gemv_w4a16",
            (build.num_blocks(weight.shape[0], ops.num_sms),),
            (*row, weight.data, weight.scale, weight.zero_point, bias, out, *_sizes(out, weight)),
            threads=32 * build.warps,
            shared_bytes=build.shared_bytes(weight.shape[1], layout_of(weight)),
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **({"GATED": 1} if is_gated else {}),
            **({"NORMED": 1} if norm is not None else {}),
            **build.defines(layout_of(weight)),
        )

    def launch_small_m(self, build: SmallMW4Build, x: Array, weight: Weight, bias: Array | None, out: Array) -> None:
        ops = self._ops
        x_map = ops.tensor_maps.get(x, x.shape[::-1], (_TILE_COLUMNS, build.cols))
        ops.launch(
            "small_m_w4a16_sm90",
            (build.num_blocks(len(x), weight.shape[0], ops.num_sms),),
            (x_map, weight.data, weight.scale, weight.zero_point, bias, out, *_sizes(out, weight)),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **build.defines,
        )

    def _copied(self, array: Array | None) -> Array | None:
        if array is None:
            return None
        copied = self._ops.temporary(array.shape, array.dtype)
        copied.data.copy_from_device_async(array.data, array.nbytes, self._ops.stream)
        return copied

    def _gather_columns(self, x: Array, order: Array) -> Array:
        ops, (m, k) = self._ops, x.shape
        out = ops.temporary(x.shape, x.dtype)
        grid = (m, math.ceil(k / THREADS))
        ops.launch("gather_columns", grid, (x, order, out, np.int32(k)), overlaps=True)
        return out


def _scale(weight: Weight) -> Array:
    return weight.scale


def _pieces(num_rows: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _sizes(out: Array, weight: Weight) -> tuple[np.int32, ...]:
    n, k = weight.shape
    spans = max(1, weight.group_size // SPAN)
    return tuple(map(np.int32, (len(out), n, k, spans)))

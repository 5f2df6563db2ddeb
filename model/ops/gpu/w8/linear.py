"""Launches the kernels for 8-bit weights (e4m3, int8; scales per row or per block) and 16-bit inputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np

from model.ops.gpu.device import THREADS, expect
from model.ops.gpu.launcher import KernelLauncher
from model.ops.gpu.w8.builds import (
    MAX_W8A16_ROWS,
    GemvW8Build,
    SmallMW8Build,
    gemv_w8_build,
    small_m_w8a16_build,
)  # fmt: skip
from model.ops.interface import Array, Fp8Rows
from model.ops.weight import Weight, WeightFormat

DenseProduct = Callable[[Array, Array, Array | None, Array], None]
"""Takes x [M, K], weight [N, K], bias [N] or None, out [M, N]."""

MAX_FUSED_ROWS = 384
"""Most rows of x for which widening in registers beats a product of 16-bit copies (H200, layers of Llama-3.1-8B)."""

FORMATS = (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8)

_BLOCK = 128  # side of an FP8_BLOCK block
_COLS_STEP = 32
_DEQUANTISED = 16  # elements per thread of dequantise_rows.cu
_MULTIPLE = 16  # divides K and addresses
_FLOAT32 = np.dtype(np.float32)
_INT8 = np.dtype(np.int8)
_UINT8 = np.dtype(np.uint8)
_log = logging.getLogger(__name__)


def expect_w8(weight: Weight) -> None:
    """Raise ValueError unless the arrays make an 8-bit weight."""
    n, k = weight.data.shape
    expect("weight.data", weight.data, _INT8 if weight.format is WeightFormat.INT8 else _UINT8, n, k)
    if weight.format is WeightFormat.FP8_BLOCK:
        expect("weight.scale", weight.scale, _FLOAT32, math.ceil(n / _BLOCK), math.ceil(k / _BLOCK))
    else:
        expect("weight.scale", weight.scale, _FLOAT32, n)


def dequantise_weight(device: KernelLauncher, weight: Weight) -> Array:
    """Return [N, K] in the dtype of `device`: data * scale, rounded once."""
    rows, width = weight.data.shape
    out = device.temporary((rows, width), device.dtype)
    grid = (rows, math.ceil(width / (THREADS * _DEQUANTISED)))
    args = (weight.data, weight.scale, out, np.int32(width))
    device.launch("dequantise_rows", grid, args, overlaps=True, **_defines(weight))
    return out


def launch_gemv(
    device: KernelLauncher, build: GemvW8Build, x: Array | Fp8Rows, weight: Weight, bias: Array | None, out: Array
) -> None:
    """Multiply up to 8 COL_TILES rows of x; rows in e4m3 require FP8 weights."""
    n, k = weight.data.shape
    x_args = (x.data, x.scale) if isinstance(x, Fp8Rows) else (x, None)
    device.launch(
        "gemv_w8",
        (build.num_blocks(n, device.num_sms),),
        (*x_args, weight.data, weight.scale, bias, out, np.int32(len(out)), np.int32(n), np.int32(k)),
        threads=32 * build.warps,
        shared_bytes=build.shared_bytes,
        overlaps=True,
        OUT_FLOAT=int(out.dtype == _FLOAT32),
        X_FP8=int(isinstance(x, Fp8Rows)),
        **_defines(weight),
        **build.defines,
    )


class W8Linear:
    def __init__(self, device: KernelLauncher, dense: DenseProduct):
        """`dense` computes products in the dtype of `device`."""
        self._device = device
        self._dense = dense
        self._has_logged = False

    def __call__(self, x: Array, weight: Weight, bias: Array | None, out: Array) -> None:
        """Compute out [M, N] = x [M, K] @ weight [N, K].T + bias [N], C-contiguous and not empty."""
        device, (m, n) = self._device, out.shape
        together = x.data.ptr | weight.data.data.ptr | out.data.ptr
        is_aligned = weight.shape[1] % _MULTIPLE == 0 and together % _MULTIPLE == 0 and device.dtype != _FLOAT32
        gemv = gemv_w8_build(m, device.max_shared_bytes) if is_aligned else None
        small_m = self.small_m_build(m, n) if is_aligned and device.arch == "90a" else None
        if gemv is not None:  # H200, a layer of Llama-3.1-8B in int8, 16 rows: 86 us; small_m_w8a16_sm90 takes 101
            launch_gemv(device, gemv, x, weight, bias, out)
        elif small_m is not None:
            for rows in pieces(m):
                self.launch_small_m(small_m, x[rows], weight, bias, out[rows])
        else:
            self._dense(x, dequantise_weight(device, weight), bias, out)

    def prepare(self, weight: Weight) -> Weight:
        """Return `weight`; log once that int8 inputs are not rounded."""
        if weight.format is WeightFormat.INT8 and weight.quantised_input and not self._has_logged:
            self._has_logged = True
            _log.info(
                "int8 weights: inputs stay in %s (W8A16), more exact than rounded to int8", self._device.dtype.name
            )
        return weight

    def small_m_build(self, m: int, n: int) -> SmallMW8Build | None:
        """Return the build for pieces of `m` rows, or None if another way is faster."""
        if m > MAX_FUSED_ROWS:
            return None
        return small_m_w8a16_build(_piece_rows(m), n, self._device.num_sms, self._device.max_shared_bytes)

    def launch_small_m(self, build: SmallMW8Build, x: Array, weight: Weight, bias: Array | None, out: Array) -> None:
        device, (n, k) = self._device, weight.data.shape
        x_map = device.tensor_maps.get(x, (k, len(out)), (64, build.cols))
        weight_map = device.tensor_maps.get(weight.data, (k // 2, n), (64, build.rows))
        device.launch(
            "small_m_w8a16_sm90",
            (build.num_blocks(n, device.num_sms),),
            (x_map, weight_map, weight.scale, bias, out, np.int32(len(out)), np.int32(n), np.int32(k)),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **_defines(weight),
            **build.defines,
        )


def pieces(num_rows: int) -> list[slice]:
    """Split rows of x for small_m_w8a16_sm90, about equally."""
    size = _piece_rows(num_rows)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _piece_rows(num_rows: int) -> int:
    if num_rows <= MAX_W8A16_ROWS:
        return num_rows
    count = math.ceil(num_rows / MAX_W8A16_ROWS)
    return _COLS_STEP * math.ceil(num_rows / count / _COLS_STEP)


def _defines(weight: Weight) -> dict[str, int]:
    is_int8, in_blocks = weight.format is WeightFormat.INT8, weight.format is WeightFormat.FP8_BLOCK
    return {"WEIGHT_INT8": int(is_int8), "BLOCK_SCALES": int(in_blocks)}

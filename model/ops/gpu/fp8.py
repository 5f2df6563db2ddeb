"""Launches the kernels of rows in e4m3."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from model.ops.gpu.device import THREADS, CudaDevice, expect
from model.ops.gpu.gemm import GemmError
from model.ops.gpu.gemm_fp8 import MULTIPLE, Fp8Gemm
from model.ops.gpu.launcher import KernelLauncher
from model.ops.gpu.w8.builds import (
    FewRowsFp8Build,
    SmallMW8Build,
    few_rows_fp8_build,
    gemv_w8_build,
    small_m_fp8_build,
)
from model.ops.gpu.w8.linear import W8Linear, dequantise_weight, launch_gemv
from model.ops.interface import Array, Fp8Rows
from model.ops.weight import Weight, WeightFormat

_UINT8 = np.dtype(np.uint8)
_UINT32 = np.dtype(np.uint32)
_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_VEC_BYTES = 16
_HELD_VECS = 4  # HELD_VECS of fp8.cuh
_EIGHT = 8  # rows of a swizzle
_REDUCTION_BYTES = 256  # static shared memory of few_rows_fp8_sm90
_ROUNDED_BYTES = 8192  # most bytes of a row that a warpgroup of few_rows_fp8_sm90 rounds
_ROW_BLOCKS = 8  # CLUSTER of silu_mul_quantised_sm90.cu
_MAX_SHARED_ROWS, _SHARED_WIDTHS = 8, (8192, 65536)
"""Most rows, and widths, for silu_mul_quantised_sm90. Measured up to 8 rows; at 64, two blocks per row gain nothing and
four cost 1 %."""


def expect_fp8(name: str, rows: Fp8Rows | Weight, width: int | None = None) -> None:
    """Raise ValueError unless `rows` has `width` e4m3 columns and a scale per row."""
    expect(f"{name}.data", rows.data, _UINT8, None, width)
    expect(f"{name}.scale", rows.scale, _FLOAT32, len(rows.data))


def quantised_by(
    device: KernelLauncher,
    kernel: str,
    args: tuple[Array, ...],
    rows: int,
    width: int,
    *numbers: np.float32,
    out: Fp8Rows | None = None,
) -> Fp8Rows:
    """Launch `kernel` and return its rows [rows, width] in e4m3, written to `out` if given."""
    if out is None:
        out = Fp8Rows(device.temporary((rows, width), _UINT8), device.temporary((rows,), _FLOAT32))
    expect_fp8("out", out, width)
    expect("out.scale", out.scale, _FLOAT32, rows)
    args = (*args, out.data, out.scale, np.int32(width), *numbers)
    device.launch(kernel, (rows,), args, threads=_row_threads(device, rows, width), overlaps=True)
    return out


def silu_mul_quantised(device: KernelLauncher, gate_up: Array) -> Fp8Rows:
    """Implement `Ops.silu_mul_quantised`."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    if not _shares_rows(device, gate_up):
        return quantised_by(device, "silu_mul_quantised", (gate_up,), rows, width)
    out = Fp8Rows(device.temporary((rows, width), _UINT8), device.temporary((rows,), _FLOAT32))
    threads = _row_threads(device, rows * _ROW_BLOCKS, width // _ROW_BLOCKS)
    args = (gate_up, out.data, out.scale, np.int32(width))
    grid = (rows * _ROW_BLOCKS,)
    device.launch("silu_mul_quantised_sm90", grid, args, threads=threads, overlaps=True, cluster=_ROW_BLOCKS)
    return out


def _shares_rows(device: KernelLauncher, gate_up: Array) -> bool:
    """Return whether several blocks per row are faster."""
    width = gate_up.shape[1] // 2
    is_few_and_wide = 0 < len(gate_up) <= _MAX_SHARED_ROWS and _SHARED_WIDTHS[0] <= width <= _SHARED_WIDTHS[1]
    is_whole = width % (_ROW_BLOCKS * _VEC_BYTES // _BFLOAT16.itemsize) == 0 and gate_up.data.ptr % _VEC_BYTES == 0
    return device.arch == "90a" and device.dtype == _BFLOAT16 and is_few_and_wide and is_whole


def as_weight(x: Fp8Rows) -> Weight:
    return Weight.fp8(x.data, x.scale)


def _row_threads(device: KernelLauncher, rows: int, width: int) -> int:
    """Return threads per block: one vector per thread if few rows would leave the device idle, else several."""
    vecs = math.ceil(width * device.dtype.itemsize / _VEC_BYTES)
    each = 1 if rows <= 2 * device.num_sms else _HELD_VECS
    each = max(each, math.ceil(vecs / 1024))
    return min(1024, math.ceil(vecs / each / 32) * 32)


class Fp8Linear:
    """Products of e4m3 rows and weights."""

    def __init__(self, device: CudaDevice, by_widening: W8Linear):
        self._device = device
        self._by_widening = by_widening
        self._gemm: Fp8Gemm | None = None  # created when needed: it has a workspace

    def __call__(self, x: Fp8Rows, weight: Weight, bias: Array | None, out: Array) -> None:
        """Compute out [M, N] = x [M, K] @ weight [N, K].T + bias [N], C-contiguous and not empty."""
        device, (m, n) = self._device, out.shape
        k = weight.data.shape[1]
        together = x.data.data.ptr | weight.data.data.ptr | out.data.ptr
        is_aligned = k % MULTIPLE == 0 and together % MULTIPLE == 0 and device.dtype != _FLOAT32
        if is_aligned and device.arch == "90a":
            few_rows = few_rows_fp8_build(m, n, k, device.num_sms, device.max_shared_bytes)
            if few_rows is not None:
                self.launch_few_rows(few_rows, x, weight, bias, out)
                return
            small_m = small_m_fp8_build(m, n, device.num_sms, device.max_shared_bytes)
            if small_m is not None:
                self.launch_small_m(small_m, x, weight, bias, out)
                return
            if n % MULTIPLE == 0 and self._by_cublaslt(x, weight, bias, out):
                return
        build = gemv_w8_build(m, device.max_shared_bytes) if is_aligned else None
        if build is not None:
            launch_gemv(device, build, x, weight, bias, out)
        else:
            self._by_widening(dequantise_weight(device, as_weight(x)), weight, bias, out)

    def gated_mlp(self, x: Fp8Rows, gate_up: Weight, down: Weight) -> Array | None:
        """Implement `Ops.gated_mlp` by two kernels; None if unsupported. That of gate_up applies the activation, that
        of down rounds its input."""
        device, m, (n, k), (n_out, width) = self._device, len(x.data), gate_up.shape, down.shape
        is_fp8 = gate_up.format is down.format is WeightFormat.FP8 and down.quantised_input and n == 2 * width and m > 0
        together = x.data.data.ptr | gate_up.data.data.ptr | down.data.data.ptr | k | width
        if not is_fp8 or device.arch != "90a" or device.dtype == _FLOAT32 or together % MULTIPLE:
            return None
        limits = device.num_sms, device.max_shared_bytes - _REDUCTION_BYTES
        first = few_rows_fp8_build(m, n, k, *limits, is_gated=True)
        second = few_rows_fp8_build(m, n_out, width, *limits)
        if first is None or second is None or second.x_bytes > second.x_rows * _ROUNDED_BYTES * second.warpgroups:
            return None
        num_parts = first.num_blocks(n, device.num_sms)
        gated = device.temporary((m, width), device.dtype)
        maxima = device.temporary((m, num_parts), _UINT32)
        out = device.temporary((m, n_out), device.dtype)
        self.launch_few_rows(first, x, gate_up, None, gated, maxima=maxima)
        self.launch_few_rows(second, Fp8Rows(gated, maxima), down, None, out)
        return out

    def launch_few_rows(
        self,
        build: FewRowsFp8Build,
        x: Fp8Rows,
        weight: Weight,
        bias: Array | None,
        out: Array,
        *,
        maxima: Array | None = None,
    ) -> None:
        """Multiply up to MAX_FEW_ROWS rows of x.

        With `maxima` uint32[M, blocks], write the gated product to out [M, N / 2] and each block's largest magnitude
        per row to `maxima`. 16-bit x is rounded first, by such maxima in x.scale.
        """
        device, (n, k) = self._device, weight.data.shape
        maps, width = device.tensor_maps, k // 2
        if maxima is None:
            weight_map = maps.get(weight.data, (width, n), (64, build.rows))
        else:
            sizes, box = (width, _EIGHT, 2, n // 16), (64, _EIGHT, 2, build.rows // 16)
            weight_map = maps.get(weight.data, sizes, box, strides=(width, n // 2 * width, _EIGHT * width))
        num_parts = x.scale.shape[1] if x.data.dtype != _UINT8 else 0
        numbers = map(np.int32, (len(out), n, k, num_parts))
        device.launch(
            "few_rows_fp8_sm90",
            (build.num_blocks(n, device.num_sms),),
            (weight_map, x.data, x.scale, weight.scale, bias, out, maxima, *numbers),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            GATED=int(maxima is not None),
            ROUNDS_X=int(num_parts > 0),
            **build.defines,
        )

    def launch_small_m(self, build: SmallMW8Build, x: Fp8Rows, weight: Weight, bias: Array | None, out: Array) -> None:
        device, (n, k) = self._device, weight.data.shape
        x_map = device.tensor_maps.get(x.data, (k // 2, len(out)), (64, build.cols))
        weight_map = device.tensor_maps.get(weight.data, (k // 2, n), (64, build.rows))
        sizes = map(np.int32, (len(out), n, k))
        device.launch(
            "small_m_fp8_sm90",
            (build.num_blocks(n, device.num_sms),),
            (x_map, weight_map, x.scale, weight.scale, bias, out, *sizes),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **build.defines,
        )

    def _by_cublaslt(self, x: Fp8Rows, weight: Weight, bias: Array | None, out: Array) -> bool:
        """Return whether cuBLASLt computed the product."""
        if self._gemm is None:
            self._gemm = Fp8Gemm(self._device.stream)
        try:
            if not self._device.kernels.are_compiled_ahead:
                self._gemm(x, Fp8Rows(weight.data, weight.scale), out)
        except GemmError:
            return False
        if bias is not None:
            grid = (len(out), math.ceil(out.shape[1] / THREADS))
            args = (out, bias, np.int32(out.shape[1]))
            self._device.launch("add_bias", grid, args, overlaps=True, OUT_FLOAT=int(out.dtype == _FLOAT32))
        return True

"""Matrix products by cuBLASLt, by `gemv` for few rows, or by `small_m_sm90` on Hopper.

`tune` measures the fastest algorithm per shape and caches it (`gemm_tuning`); other shapes take cuBLASLt's first
choice. tests/bench/measure_products.py makes the shipped measurements.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence

import numpy as np
from nvmath.bindings import cublasLt as lt

from model.ops.gpu.device import CudaDevice
from model.ops.gpu.gemm import BEST_ALIGNMENT_BYTES, Gemm, GemmError
from model.ops.gpu.gemm_tuning import (
    CUBLASLT,
    GEMV,
    SHIPPED_TUNING,
    SMALL_M,
    GemmAlgorithm,
    GemmShape,
    file_name,
    fits_gemv,
    fits_small_m,
    read_tuning,
    write_tuning,
)  # fmt: skip
from model.ops.gpu.kernels import cache_folder
from model.ops.gpu.linear_builds import (
    GEMV_BUILDS,
    SMALL_M_SPLITS,
    GemvBuild,
    SmallMBuild,
    exact_gemv_build,
    gemv_build,
    one_row_build,
    small_m_build,
)
from model.ops.gpu.norm import rms_norm
from model.ops.interface import Array

MEASURED_S = 1e-3
"""Duration of each of the three measurements of an algorithm."""

MIN_GAIN = 0.02
"""Least share of time saved over cuBLASLt's first choice; smaller gains are noise."""

_THREADS = 256
_GATED_STEP = 32  # divides the weight rows of a gated product: rows of the largest tile
_FLOAT32 = np.dtype(np.float32)
_log = logging.getLogger(__name__)

FIRST_CHOICE = GemmAlgorithm(CUBLASLT, 0)

_ONE_ROW = GemmAlgorithm(GEMV, 0)  # add_norm_gemv has the same bits


class Linear:
    def __init__(self, device: CudaDevice):
        self._device = device
        self._gemm = Gemm(device.stream)
        self._path = cache_folder() / file_name(device.device_name, lt.get_version())
        self._tuning = {**read_tuning(SHIPPED_TUNING / self._path.name), **read_tuning(self._path)}

    def __call__(self, x: Array, weight: Array, bias: Array | None, out: Array, *, exact: bool = False) -> None:
        """Compute out [M, N] = x [M, K] @ weight [N, K].T + bias [N], C-contiguous and not empty. `exact`: with the
        bits of one row, if gemv computes that."""
        if exact and self._by_exact_gemv(x, weight, bias, out):
            return
        algorithm = self._tuning.get(_shape_of(x, weight, bias, out), FIRST_CHOICE) if self._tuning else FIRST_CHOICE
        if algorithm != FIRST_CHOICE and (x.data.ptr | weight.data.ptr | out.data.ptr) % BEST_ALIGNMENT_BYTES:
            algorithm = FIRST_CHOICE
        self._carry_out(algorithm, x, weight, bias, out)

    def can_norm(self, x: Array, residual: Array, weight: Array, bias: Array | None, out: Array | None) -> bool:
        """Return whether `add_norm` supports this row: gemv computes its product, and one thread normalises each
        vector."""
        name, (n, k) = _name(self._device.dtype), weight.shape
        shape = GemmShape(len(x), n, k, name, name, bias is not None)
        arrays = (x, residual, weight) if out is None else (x, residual, weight, out)
        is_aligned = all(array.data.ptr % BEST_ALIGNMENT_BYTES == 0 for array in arrays)
        return is_aligned and _fits_norm(shape) and self._tuning.get(shape) == _ONE_ROW

    def add_norm(
        self, sums: tuple[Array, Array], norm: tuple[Array, float], weight: Array, bias: Array | None, out: Array
    ) -> None:
        """Implement `Ops.add_norm_linear` for one row that `can_norm` accepts; `sums` is (x, residual)."""
        device, (n, k), (norm_weight, eps) = self._device, weight.shape, norm
        build = one_row_build(GEMV_BUILDS[_ONE_ROW.choice], k)
        device.launch(
            "add_norm_gemv",
            (min(math.ceil(n / (16 * build.row_tiles)), device.num_sms),),
            (*sums, norm_weight, weight, bias, out, np.int32(n), np.int32(k), np.float32(eps)),
            threads=32 * build.warps,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            shared_percent=100,
            OUT_FLOAT=0,
            **build.defines,
        )

    def tune(self, weights: Sequence[Array], bias: Array | None, num_rows: Sequence[int], out_dtype: np.dtype) -> None:
        """Measure the fastest algorithm for each of `num_rows`, about 30 ms per new shape. Do not call while capturing.

        The `weights` [N, K] are used in turn and should far exceed the L2. Nothing is measured while kernels are
        compiled ahead.
        """
        device, (n, k), found = self._device, weights[0].shape, {}
        shapes = [GemmShape(m, n, k, device.dtype.name, out_dtype.name, bias is not None) for m in num_rows]
        shapes = [shape for shape in shapes if shape not in self._tuning]
        if not shapes:
            return
        most = max(shape.m for shape in shapes)
        x, out = (
            device.empty((most, k), device.dtype),
            device.empty((most, n), out_dtype),
        )
        if device.kernels.are_compiled_ahead:
            for shape in shapes:
                for algorithm in self._own_algorithms(shape):
                    self._carry_out(algorithm, x[: shape.m], weights[0], bias, out[: shape.m])
                    if algorithm == _ONE_ROW and _fits_norm(shape):
                        self.add_norm((x[:1], x[:1]), (weights[0][0], 0.0), weights[0], bias, out[:1])
            return
        self._fill(x, weights[0])
        for shape in shapes:
            found[shape] = self._autotune(shape, x[: shape.m], weights, bias, out[: shape.m])
        self._tuning = {**read_tuning(self._path), **self._tuning, **found}
        write_tuning(self._path, self._tuning)

    def gated(self, x: Array, weight: Array, out: Array) -> bool:
        """Compute out [M, I] = silu_mul of x [M, K] @ weight [2 I, K].T by gemv if possible; return whether it was.

        It has the bits of single rows and of separate kernels.
        """
        return len(weight) % _GATED_STEP == 0 and self._by_exact_gemv(x, weight, None, out, is_gated=True)

    def _by_exact_gemv(
        self, x: Array, weight: Array, bias: Array | None, out: Array, *, is_gated: bool = False
    ) -> bool:
        """Multiply by gemv, with the summation order of one row, if possible; return whether it was."""
        device = self._device
        one_row = self._tuning.get(_shape_of(x, weight, bias, out)._replace(m=1), FIRST_CHOICE)
        is_aligned = (x.data.ptr | weight.data.ptr | out.data.ptr) % BEST_ALIGNMENT_BYTES == 0
        if one_row.kind != GEMV or not is_aligned:
            return False
        build = exact_gemv_build(one_row.choice, len(x), weight.shape, device.num_sms, device.max_shared_bytes)
        if build is None:
            return False
        self._launch_gemv(build, x, weight, bias, out, is_gated=is_gated)
        return True

    def share_tuning(self, other: Linear) -> None:
        """Take over the algorithms measured by `other`, on an equal device."""
        self._tuning = other._tuning

    def _carry_out(self, algorithm: GemmAlgorithm, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        if algorithm.kind == GEMV:
            self._launch_gemv(GEMV_BUILDS[algorithm.choice], x, weight, bias, out)
        elif algorithm.kind == SMALL_M:
            build = self._small_m_build(algorithm.choice, len(x), len(weight))
            if build is None:
                raise GemmError(f"{SMALL_M}: [{len(x)}] x [{len(weight)}] is not supported on this device")
            self._launch_small_m(build, x, weight, bias, out)
        elif not self._by_cublaslt(x, weight, bias, out, algorithm.choice) and bias is not None:
            grid = (len(out), math.ceil(len(weight) / _THREADS))
            out_float = int(out.dtype == _FLOAT32)
            self._device.launch(
                "add_bias", grid, (out, bias, np.int32(len(weight))), overlaps=True, OUT_FLOAT=out_float
            )

    def _by_cublaslt(self, x: Array, weight: Array, bias: Array | None, out: Array, choice: int) -> bool:
        """Multiply by cuBLASLt; return whether it added the bias."""
        return not self._device.kernels.are_compiled_ahead and self._gemm(x, weight, bias, out, choice)

    def _launch_gemv(
        self, build: GemvBuild, x: Array, weight: Array, bias: Array | None, out: Array, *, is_gated: bool = False
    ) -> None:
        device, (n, k) = self._device, weight.shape
        if len(x) == 1 and build == GEMV_BUILDS[_ONE_ROW.choice]:
            build = one_row_build(build, k)
        tiles = math.ceil(n / (16 * build.row_tiles))
        device.launch(
            "gemv",
            (min(tiles, build.blocks_per_sm * device.num_sms),),
            (x, weight, bias, out, np.int32(len(x)), np.int32(n), np.int32(k)),
            threads=32 * build.warps,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            shared_percent=100 if build.kept_rows == 1 else 0,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **build.defines,
            **({"GATED_ROWS": 1} if is_gated else {}),
        )

    def _small_m_build(self, index: int, m: int, n: int) -> SmallMBuild | None:
        return small_m_build(SMALL_M_SPLITS[index], m, n, self._device.num_sms, self._device.max_shared_bytes)

    def _launch_small_m(self, build: SmallMBuild, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        device, (n, k) = self._device, weight.shape
        x_map = device.tensor_maps.get(x, x.shape[::-1], (64, build.cols))
        weight_map = device.tensor_maps.get(weight, (k, n), (64, build.rows))
        device.launch(
            "small_m_sm90",
            (build.num_blocks(n, device.num_sms),),
            (x_map, weight_map, bias, out, np.int32(len(x)), np.int32(n), np.int32(k)),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            OUT_FLOAT=int(out.dtype == _FLOAT32),
            **build.defines,
        )

    def _fill(self, x: Array, weight: Array) -> None:
        """Fill x with weights, because products of zeros are faster."""
        x.data.memset_async(0, x.nbytes, self._device.stream)
        x.data.copy_from_device_async(weight.data, min(x.nbytes, weight.nbytes), self._device.stream)

    def _autotune(
        self, shape: GemmShape, x: Array, weights: Sequence[Array], bias: Array | None, out: Array
    ) -> GemmAlgorithm:
        num_algorithms = self._gemm.num_algorithms(x, weights[0], bias, out)
        algorithms = [GemmAlgorithm(CUBLASLT, index) for index in range(num_algorithms)] + self._own_algorithms(shape)
        seconds = {}
        for algorithm in algorithms:
            try:
                seconds[algorithm] = self._seconds(algorithm, x, weights, bias, out)
            except (GemmError, lt.cuBLASLtError) as error:
                _log.warning("%s cannot be computed by %s: %s", shape, algorithm, error)
        best = min(seconds, key=lambda algorithm: seconds[algorithm])
        first = seconds.get(FIRST_CHOICE, math.inf)
        if seconds[best] > (1 - MIN_GAIN) * first:
            best = FIRST_CHOICE
        _log.debug("%s: %.1f us by %s, %.1f by %s", shape, seconds[best] * 1e6, best, first * 1e6, FIRST_CHOICE)
        return best

    def _own_algorithms(self, shape: GemmShape) -> list[GemmAlgorithm]:
        build = gemv_build(shape.m, self._device.max_shared_bytes) if fits_gemv(shape) else None
        if build is not None:
            return [GemmAlgorithm(GEMV, build)]
        if self._device.arch != "90a" or not fits_small_m(shape):
            return []
        builds = [self._small_m_build(index, shape.m, shape.n) for index in range(len(SMALL_M_SPLITS))]
        return [GemmAlgorithm(SMALL_M, index) for index, build in enumerate(builds) if build is not None]

    def _seconds(
        self, algorithm: GemmAlgorithm, x: Array, weights: Sequence[Array], bias: Array | None, out: Array
    ) -> float:
        """Return the least time in a graph, after a small kernel as in a step, so that an early start counts."""
        device = self._device

        def launch(weight: Array) -> None:
            with device.scratch():
                self._carry_out(algorithm, rms_norm(device, x, weight[0], 1e-5), weight, bias, out)

        launch(weights[-1])
        begin = device.record_event()
        launch(weights[0])
        num_launches = min(32, max(4, round(MEASURED_S / device.elapsed_s(begin, device.record_event()))))
        rotated = [weights[index % len(weights)] for index in range(num_launches)]

        def work() -> None:
            for weight in rotated:
                launch(weight)

        replay = device.capture(work)
        times: list[float] = []
        for _ in range(4):
            begin = device.record_event()
            replay()
            times.append(device.elapsed_s(begin, device.record_event()) / num_launches)
        return min(times[1:])


def _fits_norm(shape: GemmShape) -> bool:
    """Return whether add_norm_gemv supports the shape: one thread per vector of the row."""
    most = 8 * 32 * GEMV_BUILDS[_ONE_ROW.choice].warps
    return shape.m == 1 and shape.k % 8 == 0 and shape.k <= most and "float32" not in (shape.dtype, shape.out_dtype)


def _shape_of(x: Array, weight: Array, bias: Array | None, out: Array) -> GemmShape:
    return GemmShape(len(x), len(weight), weight.shape[1], _name(x.dtype), _name(out.dtype), bias is not None)


@functools.cache
def _name(dtype: np.dtype) -> str:
    return dtype.name

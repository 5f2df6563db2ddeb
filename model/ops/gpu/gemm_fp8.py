"""Products of e4m3 matrices with row scales, through cuBLASLt on Hopper; see `gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from nvmath import CudaDataType
from nvmath.bindings import cublasLt as lt
from nvmath.bindings.cublas import ComputeType, Operation

from model.ops.gpu.gemm import BEST_ALIGNMENT_BYTES, WORKSPACE_BYTES, GemmError
from model.ops.gpu.product_sizes import planned_rows
from model.ops.interface import Fp8Rows

MULTIPLE = 16
"""N, K and addresses are multiples of this."""

_OUT_TYPES = {
    np.dtype(np.float32): CudaDataType.CUDA_R_32F,
    np.dtype(np.float16): CudaDataType.CUDA_R_16F,
    np.dtype(ml_dtypes.bfloat16): CudaDataType.CUDA_R_16BF,
}


@dataclass(frozen=True)
class _Plan:
    """out.T [N, M] = weight.T.T [N, K] @ x.T [K, M], in cuBLASLt's column-major terms."""

    layouts: tuple[int, int, int]  # of weight, x, out
    algorithm: np.ndarray  # kept alive for its address

    @property
    def algorithm_at(self) -> int:
        return self.algorithm.ctypes.data


class Fp8Gemm:
    """Products on one stream, for one thread: they share a workspace and an operation."""

    def __init__(self, stream: cupy.cuda.Stream):
        self._stream = stream
        with stream:
            self._workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self._handle = lt.create()
        self._scalars = np.array([1, 0], np.float32)
        self._one = self._scalars.ctypes.data
        self._zero = self._one + self._scalars.itemsize
        self._operation = _operation()
        self._scale_address = np.zeros(1, np.int64)
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def __call__(self, x: Fp8Rows, weight: Fp8Rows, out: cupy.ndarray) -> None:
        """Compute out [M, N] = x [M, K] @ weight [N, K].T, N and K multiples of 16. Raises GemmError."""
        n, k = weight.data.shape
        kind = lt.MatmulDescAttribute
        self._set(kind.A_SCALE_POINTER, weight.scale.data.ptr)
        self._set(kind.B_SCALE_POINTER, x.scale.data.ptr)
        plan = self._planned(len(x.data), n, k, out.dtype, out.data.ptr)
        weight_layout, x_layout, out_layout = plan.layouts
        lt.matmul(
            self._handle, self._operation, self._one, weight.data.data.ptr, weight_layout, x.data.data.ptr, x_layout,
            self._zero, out.data.ptr, out_layout, out.data.ptr, out_layout, plan.algorithm_at, self._workspace.data.ptr,
            WORKSPACE_BYTES, self._stream.ptr,
        )  # fmt: skip

    def _set(self, attribute: lt.MatmulDescAttribute, address: int) -> None:
        self._scale_address[0] = address
        at, num_bytes = self._scale_address.ctypes.data, self._scale_address.nbytes
        lt.matmul_desc_set_attribute(self._operation, attribute, at, num_bytes)

    def _planned(self, m: int, n: int, k: int, dtype: np.dtype, address: int) -> _Plan:
        alignment = BEST_ALIGNMENT_BYTES if address % BEST_ALIGNMENT_BYTES == 0 else MULTIPLE
        rows = planned_rows(m)
        plan = self._plans.get((m, n, k, dtype, alignment))
        if plan is None:
            like = self._plans.get((rows, n, k, dtype, alignment))
            if like is None:
                like = self._plans[rows, n, k, dtype, alignment] = self._plan(rows, n, k, dtype, alignment)
            plan = like if rows == m else self._plan_like(like, m, n, k, dtype, alignment)
            self._plans[m, n, k, dtype, alignment] = plan
        return plan

    def _plan_like(self, like: _Plan, m: int, n: int, k: int, dtype: np.dtype, alignment: int) -> _Plan:
        weight, x, out = layouts = _layouts(m, n, k, dtype)
        checked = np.zeros(1, lt.matmul_heuristic_result_dtype)
        try:
            lt.matmul_algo_check(
                self._handle, self._operation, weight, x, out, out, like.algorithm_at, checked.ctypes.data
            )
        except lt.cuBLASLtError:
            return self._plan(m, n, k, dtype, alignment)
        return _Plan(layouts, like.algorithm)

    def _plan(self, m: int, n: int, k: int, dtype: np.dtype, alignment: int) -> _Plan:
        weight, x, out = layouts = _layouts(m, n, k, dtype)
        found, count = np.zeros(1, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        preference = _preference(alignment)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, self._operation, weight, x, out, out, preference, 1, found.ctypes.data, count.ctypes.data
            )
        except lt.cuBLASLtError as error:
            raise GemmError(f"cuBLASLt refuses e4m3 [{m}, {k}] @ [{n}, {k}].T to {dtype}: {error}") from error
        finally:
            lt.matmul_preference_destroy(preference)
        if count[0] == 0 or found["state"][0] != 0:
            raise GemmError(f"cuBLASLt has no algorithm for e4m3 [{m}, {k}] @ [{n}, {k}].T to {dtype}")
        return _Plan(layouts, found)


def _layouts(m: int, n: int, k: int, dtype: np.dtype) -> tuple[int, int, int]:
    return (
        lt.matrix_layout_create(CudaDataType.CUDA_R_8F_E4M3, k, n, k),
        lt.matrix_layout_create(CudaDataType.CUDA_R_8F_E4M3, k, m, k),
        lt.matrix_layout_create(_OUT_TYPES[dtype], n, m, n),
    )


def _operation() -> int:
    """Return an operation with row scales that accumulates as `small_m_fp8_sm90` does."""
    operation: int = lt.matmul_desc_create(ComputeType.COMPUTE_32F, CudaDataType.CUDA_R_32F)
    kind = lt.MatmulDescAttribute
    attributes = {
        kind.TRANSA: np.int32(Operation.T),
        kind.A_SCALE_MODE: np.int32(lt.MatmulMatrixScale.OUTER_VEC_32F),
        kind.B_SCALE_MODE: np.int32(lt.MatmulMatrixScale.OUTER_VEC_32F),
        kind.FAST_ACCUM: np.int8(1),
    }
    for attribute, value in attributes.items():
        held = np.array([value])
        lt.matmul_desc_set_attribute(operation, attribute, held.ctypes.data, held.nbytes)
    return operation


def _preference(alignment: int) -> int:
    preference: int = lt.matmul_preference_create()
    kind = lt.MatmulPreferenceAttribute
    attributes = {
        kind.MAX_WORKSPACE_BYTES: np.uint64(WORKSPACE_BYTES),
        kind.REDUCTION_SCHEME_MASK: np.uint32(lt.ReductionScheme.COMPUTE_TYPE),
        kind.MIN_ALIGNMENT_A_BYTES: np.uint32(MULTIPLE),
        kind.MIN_ALIGNMENT_B_BYTES: np.uint32(MULTIPLE),
        kind.MIN_ALIGNMENT_C_BYTES: np.uint32(alignment),
        kind.MIN_ALIGNMENT_D_BYTES: np.uint32(alignment),
    }
    for attribute, value in attributes.items():
        held = np.array([value])
        lt.matmul_preference_set_attribute(preference, attribute, held.ctypes.data, held.nbytes)
    return preference

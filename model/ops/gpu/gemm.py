"""Matrix products through cuBLASLt, which unlike CuPy's cuBLAS can be captured.

Plans are cached: later calls only launch. Sums are in float32, split-K included; float32 inputs never use TF32.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from nvmath import CudaDataType
from nvmath.bindings import cublasLt as lt
from nvmath.bindings.cublas import ComputeType, Operation

from model.ops.gpu.product_sizes import planned_rows
from model.ops.weight import Array

WORKSPACE_BYTES = 32 << 20
"""cuBLASLt's recommendation for Hopper."""

BEST_ALIGNMENT_BYTES = 256
"""Pointer alignment that cuBLASLt assumes by default."""

MAX_ALGORITHMS = 8

_TYPES = {
    np.dtype(np.float32): CudaDataType.CUDA_R_32F,
    np.dtype(np.float16): CudaDataType.CUDA_R_16F,
    np.dtype(ml_dtypes.bfloat16): CudaDataType.CUDA_R_16BF,
}


_log = logging.getLogger(__name__)


class GemmError(Exception):
    """cuBLASLt offers no algorithm for a product."""


@dataclass(frozen=True)
class _Plan:
    """out.T [N, M] = weight.T.T [N, K] @ x.T [K, M], in cuBLASLt's column-major terms."""

    operation: int
    weight: int
    x: int
    out: int
    algorithms: np.ndarray  # best estimate first; kept alive for their addresses
    algorithms_at: tuple[int, ...]
    adds_bias: bool


class Gemm:
    """Products on one stream, for one thread: they share a workspace."""

    def __init__(self, stream: cupy.cuda.Stream):
        self._stream = stream
        with stream:
            self._workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self._handle = lt.create()
        self._scalars = np.array([1, 0], np.float32)
        self._one = self._scalars.ctypes.data
        self._zero = self._one + self._scalars.itemsize
        self._bias_address = np.zeros(1, np.int64)
        self._bias_address_at = self._bias_address.ctypes.data
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def __call__(
        self,
        x: cupy.ndarray,
        weight: cupy.ndarray,
        bias: cupy.ndarray | None,
        out: cupy.ndarray,
        algorithm: int = 0,
    ) -> bool:
        """Compute out [M, N] = x [M, K] @ weight [N, K].T + bias [N], C-contiguous, not empty, of one dtype; out may
        also be float32. `algorithm` < `num_algorithms`. Return whether the bias was added; if not, the caller must.
        Raises GemmError, or cuBLASLt's error if the algorithm fails."""
        pointers, plan = self._planned(x, weight, bias, out, is_exact=algorithm > 0)
        if plan.adds_bias:
            self._point_at(bias, plan.operation)
        lt.matmul(
            self._handle, plan.operation, self._one, pointers[0], plan.weight, pointers[1], plan.x, self._zero,
            pointers[2], plan.out, pointers[2], plan.out, plan.algorithms_at[algorithm], self._workspace.data.ptr,
            WORKSPACE_BYTES, self._stream.ptr,
        )  # fmt: skip
        return plan.adds_bias

    def num_algorithms(
        self, x: cupy.ndarray, weight: cupy.ndarray, bias: cupy.ndarray | None, out: cupy.ndarray
    ) -> int:
        """Return the number of algorithms. Raises GemmError."""
        return len(self._planned(x, weight, bias, out, is_exact=True)[1].algorithms)

    def _planned(
        self, x: Array, weight: Array, bias: Array | None, out: Array, *, is_exact: bool
    ) -> tuple[tuple[int, ...], _Plan]:
        """Return (weight, x, out and bias addresses, plan); the plan has the algorithms of `planned_rows` unless
        `is_exact`."""
        pointers = weight.data.ptr, x.data.ptr, out.data.ptr, 0 if bias is None else bias.data.ptr
        together = pointers[0] | pointers[1] | pointers[2] | pointers[3] | BEST_ALIGNMENT_BYTES
        alignment = together & -together
        rows = len(x) if is_exact else planned_rows(len(x))
        key = (len(x), rows, *weight.shape, x.dtype, out.dtype, bias is None, alignment)
        plan = self._plans.get(key)
        if plan is None:
            like = self._plans.get((rows, *key[1:]))
            if like is None:
                like = self._plans[rows, *key[1:]] = self._plan_with_bias(rows, x, weight, bias, out, alignment)
            plan = self._plans[key] = like if rows == len(x) else self._plan_like(like, x, weight, bias, out, alignment)
        return pointers, plan

    def _plan_like(self, like: _Plan, x: Array, weight: Array, bias: Array | None, out: Array, alignment: int) -> _Plan:
        """Return a plan with the algorithms of `like`, which is for more rows, if they fit."""
        layouts = _layouts(len(x), x, weight, out)
        checked = np.zeros(1, lt.matmul_heuristic_result_dtype)
        weight_layout, x_layout, out_layout = layouts
        try:
            lt.matmul_algo_check(
                self._handle, like.operation, weight_layout, x_layout, out_layout, out_layout, like.algorithms_at[0],
                checked.ctypes.data,
            )  # fmt: skip
        except lt.cuBLASLtError as error:
            _log.info("%d rows are planned by themselves: %s", len(x), error)
            return self._plan_with_bias(len(x), x, weight, bias, out, alignment)
        return replace(like, weight=weight_layout, x=x_layout, out=out_layout)

    def _point_at(self, bias: cupy.ndarray, operation: int) -> None:
        self._bias_address[0] = bias.data.ptr
        attribute = lt.MatmulDescAttribute.BIAS_POINTER
        lt.matmul_desc_set_attribute(operation, attribute, self._bias_address_at, self._bias_address.nbytes)

    def _plan_with_bias(
        self, rows: int, x: Array, weight: Array, bias: Array | None, out: Array, alignment: int
    ) -> _Plan:
        if bias is not None and out.dtype == x.dtype:
            try:
                return self._plan(rows, x, weight, bias, out, alignment)
            except GemmError as error:
                _log.info("the bias gets a launch of its own: %s", error)
        return self._plan(rows, x, weight, None, out, alignment)

    def _plan(self, rows: int, x: Array, weight: Array, bias: Array | None, out: Array, alignment: int) -> _Plan:
        n, k = weight.shape
        operation = _operation(adds_bias=bias is not None)
        if bias is not None:
            self._point_at(bias, operation)
        layouts = _layouts(rows, x, weight, out)
        shapes = f"[{rows}, {k}] @ [{n}, {k}].T, {x.dtype} to {out.dtype}, aligned to {alignment} bytes"
        algorithms = self._algorithms(operation, layouts, alignment, shapes)
        addresses = tuple(algorithms.ctypes.data + i * algorithms.itemsize for i in range(len(algorithms)))
        return _Plan(operation, *layouts, algorithms, addresses, bias is not None)

    def _algorithms(self, operation: int, layouts: tuple[int, int, int], alignment: int, shapes: str) -> np.ndarray:
        """Return the algorithms, best estimate first. Raises GemmError."""
        weight, x, out = layouts
        found: np.ndarray = np.zeros(MAX_ALGORITHMS, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        preference = _preference(alignment)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, operation, weight, x, out, out, preference, MAX_ALGORITHMS, found.ctypes.data,
                count.ctypes.data,
            )  # fmt: skip
        except lt.cuBLASLtError as error:
            raise GemmError(f"cuBLASLt refuses {shapes}: {error}") from error
        finally:
            lt.matmul_preference_destroy(preference)
        found = found[: count[0]]
        found = found[found["state"] == 0]
        if len(found) == 0:
            raise GemmError(f"cuBLASLt has no algorithm for {shapes}")
        return found


def _layouts(rows: int, x: cupy.ndarray, weight: cupy.ndarray, out: cupy.ndarray) -> tuple[int, int, int]:
    n, k = weight.shape
    return (
        lt.matrix_layout_create(_TYPES[weight.dtype], k, n, k),
        lt.matrix_layout_create(_TYPES[x.dtype], k, rows, k),
        lt.matrix_layout_create(_TYPES[out.dtype], n, rows, n),
    )


def _operation(adds_bias: bool) -> int:
    operation: int = lt.matmul_desc_create(ComputeType.COMPUTE_32F, CudaDataType.CUDA_R_32F)
    attributes: dict[Any, np.generic] = {lt.MatmulDescAttribute.TRANSA: np.int32(Operation.T)}
    if adds_bias:
        attributes[lt.MatmulDescAttribute.EPILOGUE] = np.uint32(lt.Epilogue.BIAS)
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
        kind.MIN_ALIGNMENT_A_BYTES: np.uint32(alignment),
        kind.MIN_ALIGNMENT_B_BYTES: np.uint32(alignment),
        kind.MIN_ALIGNMENT_C_BYTES: np.uint32(alignment),
        kind.MIN_ALIGNMENT_D_BYTES: np.uint32(alignment),
    }
    for attribute, value in attributes.items():
        held = np.array([value])
        lt.matmul_preference_set_attribute(preference, attribute, held.ctypes.data, held.nbytes)
    return preference

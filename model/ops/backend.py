"""Opens a model's device; the GPU backend is imported on demand."""

from __future__ import annotations

import logging

import numpy as np

from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.ops.cpu.ops import NumpyOps
from model.ops.interface import Ops

KV_DTYPES = {"auto": None, "fp8": np.dtype(np.uint8), "fp8_e4m3": np.dtype(np.uint8)}
"""The cache's dtypes by name; auto: the activations'; uint8: bits of e4m3."""

log = logging.getLogger("quire.model")


def open_ops(device: str, dtype: str, model_dtype: str, kv_dtype: str = "auto") -> Ops:
    """Open `device` "auto" | "cpu" | "cuda" for activations in `dtype` "auto" | "float32" | "float16" | "bfloat16".

    Device auto is a usable GPU, else the CPU. Dtype auto is `model_dtype` on a GPU, float32 on a CPU. `kv_dtype` is one
    of KV_DTYPES or the activations' dtype. Raises ModelError for a missing device or an unsupported dtype.
    """
    if device == "cpu":
        return _open_cpu(dtype, kv_dtype)
    cuda_dtype = model_dtype if dtype == "auto" else dtype
    if device == "cuda":
        return _open_cuda(cuda_dtype, kv_dtype)
    try:
        return _open_cuda(cuda_dtype, kv_dtype)
    except ModelError as problem:
        log.info("no GPU is used: %s", problem)
        return _open_cpu(dtype, kv_dtype)


def _open_cpu(dtype: str, kv_dtype: str) -> Ops:
    return NumpyOps(NUMPY_DTYPES["float32" if dtype == "auto" else dtype], _cache_dtype(kv_dtype))


def _cache_dtype(name: str) -> np.dtype | None:
    return NUMPY_DTYPES[name] if name in NUMPY_DTYPES else KV_DTYPES[name]


def _open_cuda(dtype: str, kv_dtype: str) -> Ops:
    try:
        from model.ops.gpu.ops import CudaOps
    except ImportError as error:
        raise ModelError(f"device cuda: the GPU packages cannot be imported: {error}") from error
    try:
        return CudaOps(NUMPY_DTYPES[dtype], _cache_dtype(kv_dtype))
    except ValueError as error:
        raise ModelError(f"device cuda: {error}") from error
    except RuntimeError as error:  # CuPy's errors
        raise ModelError(f"device cuda: no usable GPU: {error}") from error

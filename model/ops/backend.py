"""Opens a model's device; the GPU backend is imported on demand."""

from __future__ import annotations

import logging

import numpy as np

from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.ops.adapter_interface import AdapterOps
from model.ops.collectives import NumpyCollectives
from model.ops.cpu.heap import keep_freed_memory
from model.ops.cpu.ops import NumpyOps
from model.ops.group.adapters import GroupAdapterOps
from model.ops.group.ops import GroupOps
from model.ops.interface import Ops

FP8_WORDS = ("fp8", "fp8_e4m3")
"""Names of an e4m3 cache, whose arrays are uint8."""

log = logging.getLogger("quire.model")


def open_group(device: str, dtype: str, model_dtype: str, kv_dtype: str, num_ranks: int) -> Ops:
    """Open `num_ranks` devices that divide a model, as in `open_ops`. Raises ModelError."""
    ops = open_ops(device, dtype, model_dtype, kv_dtype)
    if num_ranks == 1:
        return ops
    if ops.name == "cuda":
        return _open_cuda_group(ops.dtype, ops.kv_dtype, num_ranks)
    return GroupOps(
        [NumpyOps(ops.dtype, ops.kv_dtype, num_sharing=num_ranks) for _ in range(num_ranks)], NumpyCollectives()
    )


def _open_cuda_group(dtype: np.dtype, kv_dtype: np.dtype, num_ranks: int) -> Ops:
    from model.ops.gpu.group.open import open_cuda_group

    return open_cuda_group(dtype, kv_dtype, num_ranks)


def open_ops(device: str, dtype: str, model_dtype: str, kv_dtype: str = "auto") -> Ops:
    """Open `device` "auto" | "cpu" | "cuda" for activations in `dtype` "auto" | "float32" | "float16" | "bfloat16".

    Device auto is a usable GPU, else the CPU. Dtype auto is `model_dtype` on a GPU, float32 on a CPU. `kv_dtype` is
    "auto", the activations' dtype, or "fp8" | "fp8_e4m3". Raises ModelError for a missing device or an unsupported
    dtype.
    """
    if device == "cpu":
        return _open_cpu(dtype, kv_dtype)
    cuda_dtype = model_dtype if dtype == "auto" else dtype
    if device == "cuda":
        return _open_cuda(cuda_dtype, kv_dtype)
    try:
        return _open_cuda(cuda_dtype, kv_dtype)
    except ModelError as problem:
        log.info("no GPU is used: %s", str(problem))  # a log record of the error would keep its callers' models
        return _open_cpu(dtype, kv_dtype)


def adapter_ops(ops: Ops) -> AdapterOps | None:
    """Return the backend's LoRA products, or None if it has none yet."""
    if isinstance(ops, GroupOps):
        ranks = [own for rank in ops.ranks if (own := adapter_ops(rank)) is not None]
        return GroupAdapterOps(ops.ranks, ranks) if len(ranks) == ops.num_ranks else None
    return ops if isinstance(ops, AdapterOps) else None


def _open_cpu(dtype: str, kv_dtype: str) -> Ops:
    own_dtype = "float32" if dtype == "auto" else dtype
    keep_freed_memory()
    return NumpyOps(NUMPY_DTYPES[own_dtype], _cache_dtype(kv_dtype, own_dtype))


def _cache_dtype(name: str, dtype: str) -> np.dtype:
    if name in FP8_WORDS:
        return np.dtype(np.uint8)
    if name not in ("auto", dtype):
        raise ModelError(f"--kv-cache-dtype: {name} is not supported with activations in {dtype} (auto, fp8)")
    return NUMPY_DTYPES[dtype]


def _open_cuda(dtype: str, kv_dtype: str) -> Ops:
    try:
        from model.ops.gpu.ops import CudaOps
    except ImportError as error:
        raise ModelError(f"device cuda: the GPU packages cannot be imported: {error}") from error
    cache_dtype = _cache_dtype(kv_dtype, dtype)
    try:
        return CudaOps(NUMPY_DTYPES[dtype], cache_dtype)
    except ValueError as error:
        raise ModelError(f"device cuda: {error}") from error
    except RuntimeError as error:  # CuPy's errors
        raise ModelError(f"device cuda: no usable GPU: {error}") from error

"""The gate: which backend a setting opens, and the error if it is not available."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from model.errors import ModelError
from model.ops.backend import open_ops
from model.ops.cpu.ops import NumpyOps


class FakeCudaOps:
    name = "cuda"

    def __init__(self, dtype: np.dtype, kv_dtype: np.dtype | None):
        self.dtype = dtype


class DeadCudaOps:
    def __init__(self, dtype: np.dtype, kv_dtype: np.dtype | None):
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


@pytest.fixture
def gpu_backend(monkeypatch: pytest.MonkeyPatch):
    """Puts a class (None: nothing that could be imported) where the GPU backend is."""

    def put(cuda_ops: type | None) -> None:
        module = None
        if cuda_ops is not None:
            module = ModuleType("model.ops.gpu.ops")
            module.CudaOps = cuda_ops
        monkeypatch.setitem(sys.modules, "model.ops.gpu.ops", module)

    return put


@pytest.mark.parametrize(
    ("dtype", "opened"),
    [("auto", "float32"), ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")],
)
def test_cpu(dtype: str, opened: str):
    ops = open_ops("cpu", dtype, "bfloat16")
    assert isinstance(ops, NumpyOps)
    assert ops.dtype.name == opened


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_computes_in_the_dtype_that_is_stored(gpu_backend, device: str):
    gpu_backend(FakeCudaOps)
    assert open_ops(device, "auto", "bfloat16").dtype.name == "bfloat16"
    assert open_ops(device, "float16", "bfloat16").dtype.name == "float16"
    assert open_ops(device, "auto", "bfloat16").name == "cuda"


@pytest.mark.parametrize(
    ("backend", "problem"), [(None, "GPU packages cannot be imported"), (DeadCudaOps, "no usable GPU: cudaErrorNoDev")]
)
def test_auto_falls_back_and_logs_why_cuda_refused(gpu_backend, caplog, backend: type | None, problem: str):
    gpu_backend(backend)
    with caplog.at_level("INFO", "quire.model"):
        assert open_ops("auto", "auto", "bfloat16").name == "numpy"
    assert problem in caplog.text
    with pytest.raises(ModelError, match=f"device cuda: .*{problem}"):
        open_ops("cuda", "auto", "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "name", "kv_dtype"),
    [
        ("auto", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("auto", "fp8", "uint8"),
        ("float16", "fp8_e4m3", "uint8"),
    ],
)
def test_the_cache_s_dtype(dtype: str, name: str, kv_dtype: str):
    assert open_ops("cpu", dtype, "bfloat16", name).kv_dtype.name == kv_dtype


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_a_cache_in_another_float_is_refused(gpu_backend, device: str):
    gpu_backend(FakeCudaOps)
    with pytest.raises(ModelError, match="--kv-cache-dtype: float16 is not supported with activations in"):
        open_ops(device, "bfloat16", "bfloat16", "float16")

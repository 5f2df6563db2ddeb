"""Which kernel computes a product with e4m3 weights, by device and rows. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from model.ops.interface import Fp8Rows

cuda_fp8 = pytest.importorskip("model.ops.gpu.fp8", reason="needs the packages of the cuda extra", exc_type=ImportError)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ADDRESS = 1 << 20


class FakeArray:
    """Looks like a CuPy array, as far as launches ask."""

    def __init__(self, shape, dtype, address=ADDRESS):
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), SimpleNamespace(ptr=address)

    def __len__(self):
        return self.shape[0]


def rows_of(num_rows, width, address=ADDRESS):
    return Fp8Rows(FakeArray((num_rows, width), np.uint8, address), FakeArray((num_rows,), np.float32))


class FakeOps:
    """Writes down what is launched."""

    def __init__(self, arch="90a", dtype=BFLOAT16, max_shared_bytes=227 << 10):
        self.arch, self.dtype, self.max_shared_bytes, self.num_sms = arch, np.dtype(dtype), max_shared_bytes, 132
        self.tensor_maps = SimpleNamespace(get=lambda *_: None)
        self.launched = []

    def launch(self, name, grid, args, **_):
        self.launched.append(name)

    def temporary(self, shape, dtype):
        return FakeArray(shape, dtype)

    def dense(self, x, weight, bias, out):
        self.launched.append("linear")


def launched_for(m, n=4096, k=4096, *, in_e4m3=True, address=ADDRESS, cublaslt=True, **device):
    ops = FakeOps(**device)
    linear = cuda_fp8.Fp8Linear(ops, ops.dense)
    linear._by_cublaslt = lambda *_: ops.launched.append("cublasLt") or cublaslt
    x = rows_of(m, k, address) if in_e4m3 else FakeArray((m, k), ops.dtype, address)
    linear(x, rows_of(n, k), None, FakeArray((m, n), ops.dtype))
    return ops.launched


@pytest.mark.parametrize("m", [1, 16, 17, 256])
def test_on_hopper_one_kernel_takes_up_to_256_rows(m):
    assert launched_for(m) == ["small_m_fp8_sm90"]


def test_on_hopper_cublaslt_takes_more():
    assert launched_for(257) == ["cublasLt"]
    assert launched_for(257, n=4100) == ["dequantise_rows", "dequantise_rows", "linear"]
    assert launched_for(257, cublaslt=False) == ["cublasLt", "dequantise_rows", "dequantise_rows", "linear"]


@pytest.mark.parametrize("arch", ["80", "86", "89", "90a", "120"])
def test_few_rows_in_16_bits_are_multiplied_as_they_are(arch):
    assert launched_for(16, in_e4m3=False, arch=arch) == ["gemv_fp8"]
    assert launched_for(17, in_e4m3=False, arch=arch) == ["dequantise_rows", "linear"]


@pytest.mark.parametrize("arch", ["80", "86", "89", "120"])
def test_elsewhere_few_rows_have_a_kernel_and_more_are_widened(arch):
    assert launched_for(16, arch=arch, max_shared_bytes=99 << 10) == ["gemv_fp8"]
    assert launched_for(17, arch=arch) == ["dequantise_rows", "dequantise_rows", "linear"]


@pytest.mark.parametrize("odd", [{"k": 4104}, {"address": ADDRESS + 8}, {"dtype": np.float32}])
@pytest.mark.parametrize("m", [1, 100, 300])
def test_what_the_kernels_cannot_take_is_widened(odd, m):
    assert launched_for(m, **odd) == ["dequantise_rows", "dequantise_rows", "linear"]

"""Kernels of products with e4m3 weights, by device and rows. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.interface import Fp8Rows
from tests.support.fake_launcher import ADDRESS, FakeArray, FakeLauncher

cuda_fp8 = pytest.importorskip("model.ops.gpu.fp8", reason="needs the packages of the cuda extra", exc_type=ImportError)

w8 = pytest.importorskip("model.ops.gpu.w8.linear", exc_type=ImportError)


def rows_of(num_rows, width, address=ADDRESS):
    return Fp8Rows(FakeArray((num_rows, width), np.uint8, address), FakeArray((num_rows,), np.float32))


def launched_for(m, n=4096, k=4096, *, address=ADDRESS, cublaslt=True, **device):
    ops = FakeLauncher(**device)
    linear = cuda_fp8.Fp8Linear(ops, w8.W8Linear(ops, ops.dense))
    linear._by_cublaslt = lambda *_: ops.launched.append("cublasLt") or cublaslt
    linear(rows_of(m, k, address), cuda_fp8.as_weight(rows_of(n, k)), None, FakeArray((m, n), ops.dtype))
    return ops.launched


@pytest.mark.parametrize("m", [5, 16, 17, 256])
def test_on_hopper_one_kernel_takes_up_to_256_rows(m):
    assert launched_for(m) == ["small_m_fp8_sm90"]


@pytest.mark.parametrize("m", [1, 3, 4])
def test_on_hopper_another_takes_a_few(m):
    assert launched_for(m) == ["few_rows_fp8_sm90"]


@pytest.mark.parametrize(
    ("m", "inner", "device", "is_fused"),
    [
        (1, 14336, {}, True),
        (2, 14336, {}, True),
        (3, 14336, {}, False),
        (1, 2048, {}, False),
        (1, 14344, {}, False),
        (1, 14336, {"arch": "120"}, False),
        (1, 14336, {"dtype": np.float32}, False),
    ],
)
def test_on_hopper_two_kernels_take_an_mlp_of_a_few_rows(m, inner, device, is_fused):
    ops = FakeLauncher(**device)
    linear = cuda_fp8.Fp8Linear(ops, w8.W8Linear(ops, ops.dense))
    gate_up, down = (cuda_fp8.as_weight(rows_of(*shape)) for shape in ((2 * inner, 4096), (4096, inner)))
    out = linear.gated_mlp(rows_of(m, 4096), gate_up, down)
    assert (out is not None) == is_fused
    assert ops.launched == ["few_rows_fp8_sm90"] * (2 if is_fused else 0)


def test_on_hopper_cublaslt_takes_more():
    assert launched_for(257) == ["cublasLt"]
    assert launched_for(1000, n=4100) == ["dequantise_rows", "dequantise_rows", "linear"]
    assert launched_for(1000, cublaslt=False) == ["cublasLt", "dequantise_rows", "dequantise_rows", "linear"]


def test_on_hopper_widened_rows_without_cublaslt_are_multiplied_in_registers():
    assert launched_for(257, n=4100) == ["dequantise_rows", "small_m_w8a16_sm90", "small_m_w8a16_sm90"]


@pytest.mark.parametrize("arch", ["80", "86", "89", "120"])
def test_elsewhere_few_rows_have_a_kernel_and_more_are_widened(arch):
    assert launched_for(16, arch=arch, max_shared_bytes=99 << 10) == ["gemv_w8"]
    assert launched_for(17, arch=arch) == ["dequantise_rows", "dequantise_rows", "linear"]


@pytest.mark.parametrize("odd", [{"k": 4104}, {"dtype": np.float32}])
@pytest.mark.parametrize("m", [1, 100, 300])
def test_what_the_kernels_cannot_take_is_widened(odd, m):
    assert launched_for(m, **odd) == ["dequantise_rows", "dequantise_rows", "linear"]


def test_misaligned_rows_are_widened_to_aligned_ones():
    assert launched_for(1, address=ADDRESS + 8) == ["dequantise_rows", "gemv_w8"]


@pytest.mark.parametrize(
    ("rows", "width", "device", "kernel"),
    [
        (1, 14336, {}, "silu_mul_quantised_sm90"),
        (8, 8192, {}, "silu_mul_quantised_sm90"),
        (9, 14336, {}, "silu_mul_quantised"),
        (1, 4096, {}, "silu_mul_quantised"),
        (1, 14340, {}, "silu_mul_quantised"),
        (1, 14336, {"arch": "120"}, "silu_mul_quantised"),
        (1, 14336, {"dtype": np.float32}, "silu_mul_quantised"),
    ],
)
def test_blocks_share_few_wide_rows_on_hopper(monkeypatch, rows, width, device, kernel):
    ops = FakeLauncher(**device)
    monkeypatch.setattr(cuda_fp8, "expect_fp8", lambda *_: None)
    monkeypatch.setattr(cuda_fp8, "expect", lambda *_: None)
    cuda_fp8.silu_mul_quantised(ops, FakeArray((rows, 2 * width), ops.dtype))
    assert ops.launched == [kernel]

"""Products go through cuBLASLt (`model/ops/gpu/gemm.py`); the reference multiplies in float32."""

import importlib

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.weight import Weight
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_flops, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [(1, 512, 256), (7, 96, 4096), (33, 1000, 264), (300, 768, 512), (2, 3, 5), (5, 17, 33)]
"""M, N, K; the last two leave rows of no alignment at all."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_product(open_ops, rng, dtype, shape, with_bias, out_dtype):
    (m, n, k), ops, reference = shape, open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    x, weight = normal(rng, (m, k), dtype), normal(rng, (n, k), dtype, scale=k**-0.5)
    bias = normal(rng, (n,), dtype) if with_bias else None
    out_type = None if out_dtype is None else NUMPY_DTYPES[out_dtype]
    with ops.scratch():
        on_device = ops.upload(x), Weight(ops.upload(weight)), None if bias is None else ops.upload(bias)
        out = ops.download(ops.linear(*on_device, dtype=out_type))
        again = ops.download(ops.linear(*on_device, dtype=out_type))
    assert_close(out, reference.linear(x, Weight(weight), bias, dtype=out_type), out_dtype or dtype)
    np.testing.assert_array_equal(out.view(np.uint8), again.view(np.uint8))


def test_float32_does_not_go_through_tf32(open_ops, rng):
    """TF32 keeps 10 bits: its error here would be about 3e-4."""
    ops = open_ops("float32")
    x, weight = normal(rng, (256, 2048), "float32"), normal(rng, (512, 2048), "float32")
    with ops.scratch():
        out = ops.download(ops.linear(ops.upload(x), Weight(ops.upload(weight))))
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-5


def test_rows_within_a_larger_array_need_no_alignment(open_ops, rng):
    ops, reference = open_ops("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])
    x, weight = normal(rng, (9, 33), "bfloat16"), normal(rng, (40, 33), "bfloat16")
    with ops.scratch():
        out = ops.download(ops.linear(ops.upload(x)[3:], Weight(ops.upload(weight)[1:])))
    assert_close(out, reference.linear(x[3:], Weight(weight[1:])), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_numbers_of_rows_in_between_need_no_plan_of_their_own(open_ops, rng, monkeypatch, dtype, with_bias):
    ops, reference, (n, k) = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype]), (768, 512)
    x, weight = normal(rng, (640, k), dtype), normal(rng, (n, k), dtype, scale=k**-0.5)
    bias = normal(rng, (n,), dtype) if with_bias else None
    on_device = ops.upload(x), Weight(ops.upload(weight)), None if bias is None else ops.upload(bias)
    with ops.scratch():
        ops.linear(*on_device)
        gemm = importlib.import_module("model.ops.gpu.gemm")
        monkeypatch.setattr(gemm.lt, "matmul_algo_get_heuristic", lambda *_: pytest.fail("640 rows were planned"))
        for rows in (577, 600, 639, 640):
            out = ops.download(ops.linear(on_device[0][:rows], *on_device[1:]))
            assert_close(out, reference.linear(x[:rows], Weight(weight), bias), dtype)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_tuned_product_is_right_and_its_way_is_kept(open_ops, rng, monkeypatch, tmp_path, with_bias):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    cuda_linear = pytest.importorskip("model.ops.gpu.linear", reason="needs the packages of the cuda extra")
    ops, reference = open_ops("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])
    monkeypatch.setattr(ops, "_linear", cuda_linear.Linear(ops))
    ops.is_poisoning = False
    weights = [normal(rng, (768, 512), "bfloat16", scale=512**-0.5) for _ in range(2)]
    bias = normal(rng, (768,), "bfloat16") if with_bias else None
    bias_on_device = None if bias is None else ops.upload(bias)
    on_device = [Weight(ops.upload(weight)) for weight in weights]
    try:
        ops.tune_linear(on_device, bias_on_device, [1, 5, 40])
    finally:
        ops.is_poisoning = True
    for m in (1, 5, 40, 41):
        x = normal(rng, (m, 512), "bfloat16")
        with ops.scratch():
            out = ops.download(ops.linear(ops.upload(x), on_device[1], bias_on_device))
        assert_close(out, reference.linear(x, Weight(weights[1]), bias), "bfloat16")
    kept = cuda_linear.Linear(ops)
    monkeypatch.setattr(kept, "_autotune", None)  # nothing is left to measure
    kept.tune([weight.data for weight in on_device], bias_on_device, [40, 5, 1], ops.dtype)


def test_no_rows(open_ops, rng):
    ops = open_ops("bfloat16")
    weight = Weight(ops.upload(normal(rng, (40, 64), "bfloat16")))
    assert ops.linear(ops.empty((0, 64), ops.dtype), weight).shape == (0, 40)


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_speed(open_ops, m):
    ops, n, k = open_ops("bfloat16"), 28672, 4096
    x = ops.empty((m, k), ops.dtype)
    weights = [Weight(ops.empty((n, k), ops.dtype)) for _ in range(3)]
    seconds = seconds_of(ops, [lambda weight=weight: ops.linear(x, weight) for weight in weights])
    reading = f"weights at {n * k * 2 / seconds / 1e9:.0f} GB/s"
    report_flops(f"linear [{m}, {k}] @ [{n}, {k}].T bf16, {reading}", 2 * m * n * k, seconds)

"""The norm of one row as part of the product that reads it: the bits of one kernel after the other."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.norm import add_norm_linear
from model.ops.weight import Weight
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu

SHAPES = [(5120, 2048), (6144, 4096), (28672, 4096), (33, 8), (1000, 264), (2112, 2056)]
"""N, K."""


@pytest.fixture
def gemv_ops(open_ops, monkeypatch):
    """Name of a dtype -> the GPU backend, every product of which takes the first build of gemv."""
    linear = pytest.importorskip("model.ops.gpu.linear", reason="needs the packages of the cuda extra")

    class Always(dict):
        def get(self, shape, default=None):
            return linear.GemmAlgorithm(linear.GEMV, 0)

    def open_(dtype):
        ops = open_ops(dtype)
        monkeypatch.setattr(ops._linear, "_tuning", Always(any=0))
        return ops

    return open_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_has_the_bits_of_one_kernel_after_the_other(gemv_ops, rng, dtype, n, k, with_bias):
    ops, reference = gemv_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    x, residual, norm = (normal(rng, shape, dtype) for shape in ((1, k), (1, k), (k,)))
    weight = normal(rng, (n, k), dtype, scale=k**-0.5)
    bias = normal(rng, (n,), dtype) if with_bias else None

    def run(ops, call):
        with ops.scratch():
            held, product = (
                ops.upload(residual),
                (Weight(ops.upload(weight)), bias if bias is None else ops.upload(bias)),
            )
            out = call(ops, (ops.upload(x), held), (ops.upload(norm), 1e-5), product)
            return ops.download(out), ops.download(held)

    wanted = run(ops, lambda ops, *args: add_norm_linear(ops, *args, None))
    for _ in range(3):
        found = run(ops, lambda ops, sums, norm, product: ops.add_norm_linear(*sums, norm, *product))
        for each, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(each.view(np.uint16), other.view(np.uint16))
    expected = run(reference, lambda ops, *args: add_norm_linear(ops, *args, None))
    assert_close(wanted[0], expected[0], dtype)


def test_is_used_for_one_row_alone(gemv_ops, rng, monkeypatch):
    ops = gemv_ops("bfloat16")
    launched, launch = [], ops.launch
    monkeypatch.setattr(ops, "launch", lambda name, *args, **how: (launched.append(name), launch(name, *args, **how)))
    weight, norm = Weight(ops.upload(normal(rng, (64, 64), "bfloat16"))), ops.upload(normal(rng, (64,), "bfloat16"))
    for rows in (1, 2):
        with ops.scratch():
            x, residual = (ops.upload(normal(rng, (rows, 64), "bfloat16")) for _ in range(2))
            ops.add_norm_linear(x, residual, (norm, 1e-5), weight)
    assert launched == ["add_norm_gemv", "add_rms_norm", "gemv"]

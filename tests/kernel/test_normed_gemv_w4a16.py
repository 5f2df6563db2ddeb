"""The norm of one row as part of a product with 4-bit weights: the bits of one kernel after the other."""

import numpy as np
import pytest

from model.ops.norm import add_norm_linear
from tests.support.int4_checks import random_int4, upload_int4
from tests.support.kernel_checks import normal

pytestmark = pytest.mark.gpu

SHAPES = [(6144, 4096), (28672, 4096), (48, 128), (4416, 512), (1024, 2176)]
"""N, K."""

KINDS = [(128, False, "bfloat16"), (32, True, "float16"), (None, True, "bfloat16")]
"""Group size (None: K), whether there are zero points, the scales' dtype."""


@pytest.fixture
def kernels_of(monkeypatch):
    """Return a function: ops -> list to which it appends the names of its launches."""

    def kernels_of(ops):
        launched, launch = [], ops.launch
        monkeypatch.setattr(ops, "launch", lambda name, *a, **how: (launched.append(name), launch(name, *a, **how)))
        return launched

    return kernels_of


def weight_of(ops, rng, n, k, kind):
    group_size, has_zeros, scales = kind
    weight = random_int4(rng, (n, k), group_size or k, has_zeros=has_zeros, scales=scales)
    return ops.prepare_weight(upload_int4(ops, weight))


def assert_equal_bits(ops, rng, k, call, expected):
    """Compare results and residual streams of three calls with those of `expected`."""
    x, residual, norm = (normal(rng, shape, "bfloat16").astype(ops.dtype) for shape in ((1, k), (1, k), (k,)))

    def run(call):
        with ops.scratch():
            held = ops.upload(residual)
            out = call(ops.upload(x), held, (ops.upload(norm), 1e-5))
            return ops.download(out).view(np.uint16), ops.download(held).view(np.uint16)

    wanted = run(expected)
    for _ in range(3):
        for each, other in zip(run(call), wanted, strict=True):
            np.testing.assert_array_equal(each, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_has_the_bits_of_two_kernels(open_ops, rng, kernels_of, dtype, kind, n, k, with_bias):
    ops = open_ops(dtype)
    weight = weight_of(ops, rng, n, k, kind)
    bias = ops.upload(normal(rng, (n,), dtype)) if with_bias else None
    launched = kernels_of(ops)
    assert_equal_bits(
        ops, rng, k,
        lambda x, held, norm: ops.add_norm_linear(x, held, norm, weight, bias),
        lambda x, held, norm: add_norm_linear(ops, (x, held), norm, (weight, bias), None),
    )  # fmt: skip
    assert launched == ["add_rms_norm", *["gemv_w4a16"] * 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inner", "k"), [(14336, 4096), (128, 128), (2176, 512)])
def test_a_gated_product_has_the_bits_of_two_kernels(open_ops, rng, kernels_of, kind, inner, k):
    ops = open_ops("bfloat16")
    gate_up, down = weight_of(ops, rng, 2 * inner, k, kind), weight_of(ops, rng, 16, inner, (128, False, "bfloat16"))
    launched = kernels_of(ops)
    assert_equal_bits(
        ops, rng, k,
        lambda x, held, norm: ops.add_norm_gated_mlp(x, held, norm, gate_up, down),
        lambda x, held, norm: ops.gated_mlp(ops.add_rms_norm(x, held, *norm), gate_up, down),
    )  # fmt: skip
    assert launched == ["add_rms_norm", *["gemv_w4a16"] * 8]


@pytest.mark.parametrize(("rows", "k"), [(2, 512), (1, 4224)])
def test_more_rows_and_long_rows_are_normed_apart(open_ops, rng, kernels_of, rows, k):
    ops = open_ops("bfloat16")
    weight, norm = weight_of(ops, rng, 64, k, KINDS[0]), ops.upload(normal(rng, (k,), "bfloat16"))
    launched = kernels_of(ops)
    with ops.scratch():
        x, residual = (ops.upload(normal(rng, (rows, k), "bfloat16")) for _ in range(2))
        ops.add_norm_linear(x, residual, (norm, 1e-5), weight)
    assert launched == ["add_rms_norm", "gemv_w4a16"]

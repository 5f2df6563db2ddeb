"""The kernel for up to 192 rows and 8-bit weights on Hopper; the reference is float64."""

import numpy as np
import pytest

from tests.support.int4_checks import assert_product
from tests.support.kernel_checks import normal, report_bandwidth, seconds_of
from tests.support.w8_checks import KINDS, random_w8, repeated_w8, upload_w8, w8_in_float64

pytestmark = pytest.mark.gpu

SHAPES = [
    (64, 4400, 512),
    (17, 1000, 272),
    (33, 1, 16),
    (128, 96, 14336),
    (97, 333, 4144),
    (180, 8448, 112),
    (1, 17000, 528),
    (50, 4224, 1104),
    (192, 6144, 4096),
    (130, 40000, 144),
]
"""M, N, K: whole tiles and rounds of them; ends of tiles, of blocks, of K, and of both thread blocks' parts of K."""

TOLERANCES = {"float16": 8e-4, "bfloat16": 4e-3}
"""Weights times their blocks' scales are rounded to the activations' type: 1.7e-3 in bfloat16."""


@pytest.fixture
def launch(open_hopper_ops):
    """ops, x, weight, bias, out -> launches the kernel."""
    reason = "needs the packages of the cuda extra"
    linear = pytest.importorskip("model.ops.gpu.w8.linear", reason=reason, exc_type=ImportError).W8Linear

    def launch_(ops, x, weight, bias, out):
        launcher = linear(ops, None)
        launcher.launch_small_m(launcher.small_m_build(*out.shape), x, weight, bias, out)

    return launch_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product(open_hopper_ops, launch, rng, dtype, kind, shape):
    (m, n, k), ops = shape, open_hopper_ops(dtype)
    weight, x = random_w8(rng, n, k, kind), normal(rng, (m, k), dtype)
    bias = normal(rng, (n,), dtype) if m % 2 else None
    with ops.scratch():
        out, again = ops.temporary((m, n), np.float32), ops.temporary((m, n), ops.dtype)
        on_device = upload_w8(ops, weight), None if bias is None else ops.upload(bias)
        launch(ops, ops.upload(x), *on_device, out)
        launch(ops, ops.upload(x), *on_device, again)
        tolerance = TOLERANCES[dtype] if kind == "fp8-block" else 3e-5
        assert_product(ops.download(out), x, w8_in_float64(weight), bias, tolerance)
        rounded = ops.download(out).astype(ops.dtype)
        np.testing.assert_array_equal(ops.download(again).view(np.uint16), rounded.view(np.uint16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_other_rows(open_hopper_ops, launch, rng, kind):
    n, k, ops = 6144, 1104, open_hopper_ops("bfloat16")
    x, weight = normal(rng, (192, k), "bfloat16"), upload_w8(ops, random_w8(rng, n, k, kind))
    found = []
    for m in (9, 17, 40, 64, 100, 128, 160, 192):
        with ops.scratch():
            out = ops.temporary((m, n), ops.dtype)
            launch(ops, ops.upload(x[:m]), weight, None, out)
            found.append(ops.download(out).view(np.uint16))
    for part in found:
        np.testing.assert_array_equal(part, found[-1][: len(part)])


@pytest.mark.parametrize(("m", "n", "k"), [(16, 28672, 4096), (64, 28672, 4096), (128, 28672, 4096), (64, 4096, 14336)])
@pytest.mark.parametrize("kind", KINDS)
def test_speed(open_hopper_ops, launch, rng, m, n, k, kind):
    ops = open_hopper_ops("bfloat16")
    x, weight = ops.upload(normal(rng, (m, k), "bfloat16")), repeated_w8(rng, n, k, kind)
    weights, out = [upload_w8(ops, weight) for _ in range(8)], ops.empty((m, n), ops.dtype)
    seconds = seconds_of(ops, [lambda weight=weight: launch(ops, x, weight, None, out) for weight in weights])
    report_bandwidth(f"small_m_w8a16_sm90 {kind} [{m}, {k}] @ [{n}, {k}].T", n * k, seconds)

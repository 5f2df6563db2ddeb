"""The kernel that reads 4-bit weights for a few rows, in each of its builds; the reference is float64."""

import numpy as np
import pytest

from tests.support.int4_checks import assert_product, in_float64, random_int4, upload_int4
from tests.support.kernel_checks import normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [(1, 4400, 512), (4, 96, 14336), (3, 16, 128), (8, 1008, 1152), (7, 48, 2176), (16, 9008, 256), (13, 560, 640)]
"""M, N, K: whole tiles, and ends of tiles and of the warps' spans. A build takes those it has rows for."""

KINDS = [(128, False, "bfloat16"), (64, True, "float16"), (32, False, "float16"), (None, True, "bfloat16")]
"""Group size (None: K), whether there are zero points, the scales' dtype."""


@pytest.fixture(params=[(1, 1), (1, 2), (1, 3), (4, 2), (8, 3), (16, 2)], ids=lambda build: "x".join(map(str, build)))
def launch(request, open_ops):
    """Return a function: ops, x, weight, bias, out -> launches a build for these rows of x and sixteens of weight
    rows."""
    reason = "needs the packages of the cuda extra"
    builds = pytest.importorskip("model.ops.gpu.int4.builds")
    int4 = pytest.importorskip("model.ops.gpu.int4.linear", reason=reason, exc_type=ImportError)
    x_rows, row_tiles = request.param

    def launch_(ops, x, weight, bias, out):
        if len(out) > x_rows:
            pytest.skip("more rows than this build takes")
        build, layout = builds.GemvW4Build(row_tiles, x_rows, stages=2), int4.layout_of(weight)
        if build.shared_bytes(weight.shape[1], layout) > ops.max_shared_bytes or weight.shape[0] < 16 * row_tiles:
            pytest.skip("this build needs more shared memory, or rows")
        int4.Int4Linear(ops, None).launch_gemv(build, x, weight, bias, out)

    return launch_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product(open_ops, launch, rng, dtype, kind, shape):
    (m, n, k), ops = shape, open_ops(dtype)
    group_size, has_zeros, scales = kind
    weight = random_int4(rng, (n, k), group_size or k, has_zeros=has_zeros, scales=scales)
    x, bias = normal(rng, (m, k), dtype), normal(rng, (n,), dtype) if m % 2 else None
    on_device = ops.prepare_weight(upload_int4(ops, weight)), None if bias is None else ops.upload(bias)
    with ops.scratch():
        out, again = ops.temporary((m, n), np.float32), ops.temporary((m, n), ops.dtype)
        launch(ops, ops.upload(x), *on_device, out)
        launch(ops, ops.upload(x), *on_device, again)
        assert_product(ops.download(out), x, in_float64(weight), bias, tolerance=5e-5)
        rounded = ops.download(out).astype(ops.dtype)
        np.testing.assert_array_equal(ops.download(again).view(np.uint16), rounded.view(np.uint16))


def test_a_row_does_not_depend_on_other_rows(open_ops, launch, rng):
    m, n, k = 4, 1008, 4096
    ops = open_ops("bfloat16")
    x, weight = normal(rng, (m, k), "bfloat16"), ops.prepare_weight(upload_int4(ops, random_int4(rng, (n, k), 128)))
    found = []
    for num_rows in range(1, m + 1):
        with ops.scratch():
            out = ops.temporary((num_rows, n), ops.dtype)
            launch(ops, ops.upload(x[:num_rows]), weight, None, out)
            found.append(ops.download(out).view(np.uint16))
    for part in found:
        np.testing.assert_array_equal(part, found[-1][: len(part)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4416, 512), (3, 32, 1152), (8, 1024, 2176)])
def test_a_gated_product_has_the_bits_of_two_kernels(open_ops, rng, kind, m, n, k):
    ops, (group_size, has_zeros, scales) = open_ops("bfloat16"), kind
    weight = random_int4(rng, (n, k), group_size or k, has_zeros=has_zeros, scales=scales)
    weight, x = ops.prepare_weight(upload_int4(ops, weight)), ops.upload(normal(rng, (m, k), "bfloat16"))
    reason = "needs the packages of the cuda extra"
    int4 = pytest.importorskip("model.ops.gpu.int4.linear", reason=reason, exc_type=ImportError)
    with ops.scratch():
        gated = int4.Int4Linear(ops, None).gated(x, weight)
        expected = ops.silu_mul(ops.linear(x, weight))
        np.testing.assert_array_equal(ops.download(gated).view(np.uint16), ops.download(expected).view(np.uint16))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (1, 28672, 4096), (1, 4096, 14336), (8, 28672, 4096)])
def test_speed(open_ops, launch, rng, m, n, k):
    ops = open_ops("bfloat16")
    x, weight = ops.upload(normal(rng, (m, k), "bfloat16")), random_int4(rng, (n, k), 128)
    weights = [ops.prepare_weight(upload_int4(ops, weight)) for _ in range(8)]
    out = ops.empty((m, n), ops.dtype)
    seconds = seconds_of(ops, [lambda weight=weight: launch(ops, x, weight, None, out) for weight in weights])
    report_bandwidth(f"gemv_w4a16 [{m}, {k}] @ [{n}, {k}].T", weights[0].nbytes, seconds)

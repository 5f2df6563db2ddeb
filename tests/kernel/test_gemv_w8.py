"""The kernel that reads 8-bit weights for a few rows, in each of its builds; the reference is float64."""

import numpy as np
import pytest

from model.ops.weight import Weight, WeightFormat
from tests.support.fp8_checks import as_weight, assert_product, random_rows, repeated_rows, upload
from tests.support.int4_checks import assert_product as assert_near
from tests.support.kernel_checks import normal, report_bandwidth, seconds_of
from tests.support.w8_checks import KINDS, random_w8, upload_w8, w8_in_float64

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 4400, 512),
    (8, 96, 14336),
    (3, 1, 16),
    (5, 1000, 272),
    (7, 33, 4144),
    (8, 9000, 112),
    (9, 4400, 512),
    (16, 96, 14336),
    (13, 1000, 272),
]
"""M, N, K: whole tiles, and ends of tiles and of K in the middle of everything. A build takes those it has rows for."""


@pytest.fixture(params=range(4))
def launch(request, open_ops):
    """Name of a dtype, x, weight, bias, out -> launches one build of the kernel."""
    reason = "needs the packages of the cuda extra"
    builds = pytest.importorskip("model.ops.gpu.w8.builds").GEMV_W8_BUILDS
    linear = pytest.importorskip("model.ops.gpu.w8.linear", reason=reason, exc_type=ImportError)
    build = builds[request.param]

    def launch_(ops, x, weight, bias, out):
        if len(out) > 8 * build.col_tiles:
            pytest.skip("more rows than this build takes")
        if build.shared_bytes > ops.max_shared_bytes:
            pytest.skip("this build needs more shared memory than the device has")
        linear.launch_gemv(ops, build, x, weight if isinstance(weight, Weight) else as_weight(weight), bias, out)

    return launch_


def inputs(rng, m, n, k, dtype, kind, with_bias):
    x = random_rows(rng, m, k) if kind == "e4m3" else normal(rng, (m, k), dtype)
    return x, random_rows(rng, n, k), normal(rng, (n,), dtype) if with_bias else None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["16 bits", "e4m3"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(open_ops, launch, rng, dtype, kind, shape, with_bias):
    (m, n, k), ops = shape, open_ops(dtype)
    x, weight, bias = inputs(rng, m, n, k, dtype, kind, with_bias)
    with ops.scratch():
        out, again = ops.temporary((m, n), np.float32), ops.temporary((m, n), ops.dtype)
        on_device = upload(ops, x), upload(ops, weight), None if bias is None else ops.upload(bias)
        launch(ops, *on_device, out)
        launch(ops, *on_device, again)
        assert_product(ops.download(out), x, weight, bias, tolerance=3e-5)
        rounded = ops.download(out).astype(ops.dtype)
        np.testing.assert_array_equal(ops.download(again).view(np.uint16), rounded.view(np.uint16))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kinds_of_weights(open_ops, launch, rng, dtype, kind, shape):
    (m, n, k), ops = shape, open_ops(dtype)
    weight, x = random_w8(rng, n, k, kind), normal(rng, (m, k), dtype)
    bias = normal(rng, (n,), dtype) if m % 2 else None
    with ops.scratch():
        out = ops.temporary((m, n), np.float32)
        on_device = upload_w8(ops, weight), None if bias is None else ops.upload(bias)
        launch(ops, ops.upload(x), *on_device, out)
        assert_near(ops.download(out), x, w8_in_float64(weight), bias, tolerance=3e-5)


@pytest.mark.parametrize("kind", ["16 bits", "e4m3"])
def test_a_row_does_not_depend_on_other_rows(open_ops, launch, rng, kind):
    m, n, k = 8, 1000, 4096
    ops = open_ops("bfloat16")
    x, weight, _ = inputs(rng, m, n, k, "bfloat16", kind, with_bias=False)
    weight = upload(ops, weight)
    found = []
    for num_rows in range(1, m + 1):
        part = type(x)(x.data[:num_rows], x.scale[:num_rows]) if kind == "e4m3" else x[:num_rows]
        with ops.scratch():
            out = ops.temporary((num_rows, n), ops.dtype)
            launch(ops, upload(ops, part), weight, None, out)
            found.append(ops.download(out).view(np.uint16))
    for part in found:
        np.testing.assert_array_equal(part, found[-1][: len(part)])


@pytest.mark.parametrize("code", [0x08, 0x07, 0x01, 0x81, 0x7E, 0xFE])
def test_every_weight_is_widened_exactly(open_ops, launch, code):
    """The smallest normal number, both ends of those below it, and the largest; each summed by itself."""
    ops, k = open_ops("bfloat16"), 256
    data = np.zeros((k, k), np.uint8)
    np.fill_diagonal(data, code)
    random = random_rows(np.random.default_rng(0), 1, 1)
    weight = type(random)(data, np.ones(k, np.float32))
    x = np.ones((1, k), ops.dtype)
    with ops.scratch():
        out = ops.temporary((1, k), np.float32)
        launch(ops, ops.upload(x), upload(ops, weight), None, out)
        assert_product(ops.download(out), x, weight, None, tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_int8_is_widened_exactly(open_ops, launch, dtype):
    ops, k = open_ops(dtype), 256
    data = np.zeros((k, k), np.int8)
    np.fill_diagonal(data, np.arange(-128, 128))
    weight = Weight(ops.upload(data), WeightFormat.INT8, ops.upload(np.ones(k, np.float32)))
    with ops.scratch():
        out = ops.temporary((1, k), np.float32)
        launch(ops, ops.upload(np.ones((1, k), ops.dtype)), weight, None, out)
        np.testing.assert_array_equal(ops.download(out)[0], np.arange(-128, 128))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (1, 28672, 4096), (8, 4096, 14336), (16, 28672, 4096)])
@pytest.mark.parametrize("kind", ["16 bits", "e4m3"])
def test_speed(open_ops, launch, rng, m, n, k, kind):
    ops = open_ops("bfloat16")
    x, weight = random_rows(rng, m, k) if kind == "e4m3" else normal(rng, (m, k), "bfloat16"), repeated_rows(rng, n, k)
    x, weights, out = upload(ops, x), [upload(ops, weight) for _ in range(8)], ops.empty((m, n), ops.dtype)
    seconds = seconds_of(ops, [lambda weight=weight: launch(ops, x, weight, None, out) for weight in weights])
    report_bandwidth(f"gemv_w8 [{m}, {k}] of {kind} @ [{n}, {k}].T", n * k, seconds)

"""The kernel for up to 256 rows in e4m3 on Hopper; the reference is that of `linear`."""

import numpy as np
import pytest

from model.ops.gpu.w8.builds import small_m_fp8_build
from model.ops.interface import Fp8Rows
from tests.support.fp8_checks import as_weight, assert_product, random_rows, repeated_rows, upload
from tests.support.kernel_checks import normal, report_bandwidth, seconds_of

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
    (256, 6144, 4096),
    (200, 40000, 144),
]
"""M, N, K: whole tiles and rounds of them; ends of tiles, of K, and of both blocks' parts of K in the middle of all."""


@pytest.fixture
def launch(open_hopper_ops):
    """ops, x, weight, bias, out -> launches the kernel."""
    reason = "needs the packages of the cuda extra"
    linear = pytest.importorskip("model.ops.gpu.fp8", reason=reason, exc_type=ImportError).Fp8Linear

    def launch_(ops, x, weight, bias, out):
        build = small_m_fp8_build(*out.shape, ops.num_sms, ops.max_shared_bytes)
        linear(ops, None).launch_small_m(build, x, as_weight(weight), bias, out)

    return launch_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(open_hopper_ops, launch, rng, dtype, shape, with_bias):
    (m, n, k), ops = shape, open_hopper_ops(dtype)
    x, weight = random_rows(rng, m, k), random_rows(rng, n, k)
    bias = normal(rng, (n,), dtype) if with_bias else None
    with ops.scratch():
        out, again = ops.temporary((m, n), np.float32), ops.temporary((m, n), ops.dtype)
        on_device = upload(ops, x), upload(ops, weight), None if bias is None else ops.upload(bias)
        launch(ops, *on_device, out)
        launch(ops, *on_device, again)
        assert_product(ops.download(out), x, weight, bias)
        rounded = ops.download(out).astype(ops.dtype)
        np.testing.assert_array_equal(ops.download(again).view(np.uint16), rounded.view(np.uint16))


@pytest.mark.parametrize("m", [17, 64, 65, 127, 129, 255])
def test_rows_past_the_last_are_neither_read_nor_written(open_hopper_ops, launch, rng, m):
    n, k, ops = 1040, 528, open_hopper_ops("bfloat16")
    x, weight = random_rows(rng, m + 9, k), random_rows(rng, n + 9, k)
    x.data[m:], x.scale[m:], weight.data[n:], weight.scale[n:] = 0x7F, np.nan, 0x7F, np.nan
    kept = normal(rng, (m + 9, n), "bfloat16")
    out, x_there, weight_there = ops.upload(kept), upload(ops, x), upload(ops, weight)
    of_x = Fp8Rows(x_there.data[:m], x_there.scale[:m])
    launch(ops, of_x, Fp8Rows(weight_there.data[:n], weight_there.scale[:n]), None, out[:m])
    found = ops.download(out)
    assert_product(found[:m], Fp8Rows(x.data[:m], x.scale[:m]), Fp8Rows(weight.data[:n], weight.scale[:n]), None)
    np.testing.assert_array_equal(found[m:].view(np.uint16), kept[m:].view(np.uint16))


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 1104), (20000, 528)])
def test_a_row_does_not_depend_on_other_rows(open_hopper_ops, launch, rng, n, k):
    ops = open_hopper_ops("bfloat16")
    x, weight = random_rows(rng, 256, k), upload(ops, random_rows(rng, n, k))
    found = []
    for m in (1, 16, 17, 40, 64, 100, 128, 160, 256):
        with ops.scratch():
            out = ops.temporary((m, n), ops.dtype)
            launch(ops, upload(ops, Fp8Rows(x.data[:m], x.scale[:m])), weight, None, out)
            found.append(ops.download(out).view(np.uint16))
    for part in found:
        np.testing.assert_array_equal(part, found[-1][: len(part)])


def test_kernels_of_a_graph_that_begin_early_still_wait_for_each_other(open_hopper_ops, rng):
    """A chain in which each kernel reads what the one before wrote, and overwrites what the one before read."""
    m, width, ops = 40, 2048, open_hopper_ops("bfloat16")
    weights = [as_weight(upload(ops, random_rows(rng, width, width))) for _ in range(6)]
    norm = ops.upload(normal(rng, (width,), "bfloat16"))
    start = ops.upload(normal(rng, (m, width), "bfloat16"))
    hidden, between = (ops.empty((m, width), ops.dtype) for _ in range(2))

    def work():
        with ops.stream:
            hidden[...] = start
            for weight in weights:
                with ops.scratch():
                    ops.linear(ops.rms_norm_quantised(hidden, norm, 1e-5), weight, out=between)
                    ops.linear(ops.quantise_rows(between), weight, out=hidden)

    work()
    expected = ops.download(hidden)
    assert np.isfinite(expected.astype(np.float32)).all()
    ops.is_poisoning = False
    try:
        replay = ops.capture(work)
        for _ in range(20):
            replay()
            np.testing.assert_array_equal(ops.download(hidden).view(np.uint16), expected.view(np.uint16))
    finally:
        ops.is_poisoning = True


@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 28672, 4096), (64, 28672, 4096), (128, 28672, 4096), (64, 4096, 14336), (64, 6144, 4096)]
)
def test_speed(open_hopper_ops, launch, rng, m, n, k):
    ops = open_hopper_ops("bfloat16")
    x, weight = upload(ops, random_rows(rng, m, k)), repeated_rows(rng, n, k)
    weights, out = [upload(ops, weight) for _ in range(8)], ops.empty((m, n), ops.dtype)
    seconds = seconds_of(ops, [lambda weight=weight: launch(ops, x, weight, None, out) for weight in weights])
    report_bandwidth(f"small_m_fp8_sm90 [{m}, {k}] @ [{n}, {k}].T", n * k, seconds)

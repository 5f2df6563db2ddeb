"""The Hopper kernel for up to 2,048 rows and 4-bit weights; the reference is float64."""

import numpy as np
import pytest

from tests.support.int4_checks import assert_product, in_float64, random_int4, upload_int4
from tests.support.kernel_checks import normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [
    (64, 4400, 512),
    (17, 1008, 384),
    (3, 16, 128),
    (128, 96, 14336),
    (97, 336, 4224),
    (180, 8448, 256),
    (33, 17008, 640),
    (256, 6144, 4096),
    (65, 40000, 256),
    (300, 1040, 640),
    (1000, 336, 1152),
]
"""M, N, K: whole tiles and rounds of them; ends of tiles, and parts of K that differ by a span."""

KINDS = [(128, False, "bfloat16"), (64, True, "float16"), (32, False, "bfloat16"), (None, True, "bfloat16")]
"""Group size (None: K), whether there are zero points, the scales' dtype."""

TOLERANCES = {"float16": 8e-4, "bfloat16": 5e-3}
"""Scales and scaled weights are rounded to the activations' type: each gives 1.1e-3 in bfloat16."""


@pytest.fixture
def launch(open_hopper_ops):
    """ops, x, weight, bias, out -> launches the kernel."""
    reason = "needs the packages of the cuda extra"
    linear = pytest.importorskip("model.ops.gpu.int4.linear", reason=reason, exc_type=ImportError).Int4Linear

    def launch_(ops, x, weight, bias, out):
        launcher = linear(ops, None)
        launcher.launch_small_m(launcher.small_m_build(len(out), weight), x, weight, bias, out)

    return launch_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product(open_hopper_ops, launch, rng, dtype, kind, shape):
    (m, n, k), ops = shape, open_hopper_ops(dtype)
    group_size, has_zeros, scales = kind
    weight = random_int4(rng, (n, k), group_size or k, has_zeros=has_zeros, scales=scales)
    x, bias = normal(rng, (m, k), dtype), normal(rng, (n,), dtype) if m % 2 else None
    on_device = ops.prepare_weight(upload_int4(ops, weight)), None if bias is None else ops.upload(bias)
    with ops.scratch():
        out, again = ops.temporary((m, n), np.float32), ops.temporary((m, n), ops.dtype)
        launch(ops, ops.upload(x), *on_device, out)
        launch(ops, ops.upload(x), *on_device, again)
        assert_product(ops.download(out), x, in_float64(weight), bias, TOLERANCES[dtype])
        rounded = ops.download(out).astype(ops.dtype)
        np.testing.assert_array_equal(ops.download(again).view(np.uint16), rounded.view(np.uint16))


@pytest.mark.parametrize("m", [17, 64, 65, 127, 255, 300])
def test_rows_past_the_last_are_neither_read_nor_written(open_hopper_ops, launch, rng, m):
    n, k, ops = 1040, 640, open_hopper_ops("bfloat16")
    x, weight = normal(rng, (m + 9, k), "bfloat16"), random_int4(rng, (n, k), 128)
    x[m:] = np.nan
    kept = normal(rng, (m + 9, n), "bfloat16")
    out, x_there = ops.upload(kept), ops.upload(x)
    launch(ops, x_there[:m], ops.prepare_weight(upload_int4(ops, weight)), None, out[:m])
    found = ops.download(out)
    assert_product(found[:m], x[:m], in_float64(weight), None, TOLERANCES["bfloat16"])
    np.testing.assert_array_equal(found[m:].view(np.uint16), kept[m:].view(np.uint16))


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 1152), (20000, 640)])
def test_a_row_does_not_depend_on_other_rows(open_hopper_ops, launch, rng, n, k):
    ops = open_hopper_ops("bfloat16")
    x = normal(rng, (600, k), "bfloat16")
    weight = ops.prepare_weight(upload_int4(ops, random_int4(rng, (n, k), 128)))
    found = []
    for m in (1, 17, 40, 64, 100, 128, 160, 256, 400, 600):
        with ops.scratch():
            out = ops.temporary((m, n), ops.dtype)
            launch(ops, ops.upload(x[:m]), weight, None, out)
            found.append(ops.download(out).view(np.uint16))
    for part in found:
        np.testing.assert_array_equal(part, found[-1][: len(part)])


def test_kernels_of_a_graph_that_begin_early_still_wait_for_each_other(open_hopper_ops, rng):
    """A chain in which each kernel reads what the one before wrote, and overwrites what the one before read."""
    m, width, ops = 40, 2048, open_hopper_ops("bfloat16")
    weights = [ops.prepare_weight(upload_int4(ops, random_int4(rng, (width, width), 128))) for _ in range(6)]
    norm = ops.upload(normal(rng, (width,), "bfloat16"))
    start = ops.upload(normal(rng, (m, width), "bfloat16"))
    hidden, between = (ops.empty((m, width), ops.dtype) for _ in range(2))

    def work():
        with ops.stream:
            hidden[...] = start
            for weight in weights:
                with ops.scratch():
                    ops.linear(ops.rms_norm(hidden, norm, 1e-5), weight, out=between)
                    ops.linear(ops.rms_norm(between, norm, 1e-5)[:1], weight, out=hidden[:1])
                    ops.linear(between, weight, out=hidden)

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


@pytest.mark.parametrize(("m", "n", "k"), [(64, 28672, 4096), (64, 4096, 14336), (256, 28672, 4096)])
def test_speed(open_hopper_ops, launch, rng, m, n, k):
    ops = open_hopper_ops("bfloat16")
    x, weight = ops.upload(normal(rng, (m, k), "bfloat16")), random_int4(rng, (n, k), 128)
    weights = [ops.prepare_weight(upload_int4(ops, weight)) for _ in range(8)]
    out = ops.empty((m, n), ops.dtype)
    seconds = seconds_of(ops, [lambda weight=weight: launch(ops, x, weight, None, out) for weight in weights])
    report_bandwidth(f"small_m_w4a16_sm90 [{m}, {k}] @ [{n}, {k}].T", weights[0].nbytes, seconds)

"""The kernel for a few e4m3 rows on Hopper; the reference is that of `linear`, the bits are `small_m_fp8_sm90`'s."""

import numpy as np
import pytest

from model.ops.gpu.w8.builds import few_rows_fp8_build, small_m_fp8_build
from model.ops.interface import Fp8Rows
from model.ops.mlp import gated_mlp
from tests.support.fp8_checks import as_weight, assert_product, random_rows, repeated_rows, upload
from tests.support.kernel_checks import normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [(1, 6144, 4096), (1, 333, 4144), (2, 4400, 512), (3, 1000, 272), (4, 1, 16), (4, 96, 14336), (3, 17000, 528)]
"""M, N, K: whole tiles and rounds of them; ends of tiles, of K, and of both blocks' parts of K in the middle of all."""


@pytest.fixture
def linear(open_hopper_ops):
    reason = "needs the packages of the cuda extra"
    fp8_linear = pytest.importorskip("model.ops.gpu.fp8", reason=reason, exc_type=ImportError).Fp8Linear
    return lambda ops: fp8_linear(ops, None)


@pytest.fixture
def launch(linear):
    """ops, x, weight, bias, out -> launches the kernel."""

    def launch_(ops, x, weight, bias, out):
        build = few_rows_fp8_build(*out.shape, x.data.shape[1], ops.num_sms, ops.max_shared_bytes)
        linear(ops).launch_few_rows(build, x, as_weight(weight), bias, out)

    return launch_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(open_hopper_ops, linear, launch, rng, dtype, shape, with_bias):
    (m, n, k), ops = shape, open_hopper_ops(dtype)
    x, weight = random_rows(rng, m, k), random_rows(rng, n, k)
    bias = normal(rng, (n,), dtype) if with_bias else None
    with ops.scratch():
        out, other = (ops.temporary((m, n), np.float32) for _ in range(2))
        rounded = ops.temporary((m, n), ops.dtype)
        on_device = upload(ops, x), upload(ops, weight), None if bias is None else ops.upload(bias)
        launch(ops, *on_device, out)
        launch(ops, *on_device, rounded)
        assert_product(ops.download(out), x, weight, bias)
        found = ops.download(out).astype(ops.dtype)
        np.testing.assert_array_equal(ops.download(rounded).view(np.uint16), found.view(np.uint16))
        build = small_m_fp8_build(m, n, ops.num_sms, ops.max_shared_bytes)
        x_there, weight_there, bias_there = on_device
        linear(ops).launch_small_m(build, x_there, as_weight(weight_there), bias_there, other)
        np.testing.assert_array_equal(ops.download(out).view(np.uint32), ops.download(other).view(np.uint32))


@pytest.mark.parametrize("m", [1, 2, 3])
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


def test_kernels_of_a_graph_that_begin_early_still_wait_for_each_other(open_hopper_ops, rng):
    """A chain in which each kernel reads what the one before wrote, and overwrites what the one before read."""
    m, width, ops = 1, 4096, open_hopper_ops("bfloat16")
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


@pytest.mark.parametrize(("m", "hidden", "inner"), [(1, 4096, 14336), (2, 528, 6000), (2, 272, 3312)])
def test_a_gated_mlp_has_the_bits_of_its_operations(open_hopper_ops, rng, monkeypatch, m, hidden, inner):
    ops, names = open_hopper_ops("bfloat16"), []
    real = ops.launch
    monkeypatch.setattr(ops, "launch", lambda name, *args, **how: (names.append(name), real(name, *args, **how)))
    gate_up, down = (
        as_weight(upload(ops, random_rows(rng, *shape))) for shape in ((2 * inner, hidden), (hidden, inner))
    )
    x = upload(ops, random_rows(rng, m, hidden))
    with ops.scratch():
        fused = ops.gated_mlp(x, gate_up, down)
        assert names == ["few_rows_fp8_sm90"] * 2
        found, expected = ops.download(fused), ops.download(gated_mlp(ops, x, gate_up, down))
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)])
def test_speed(open_hopper_ops, launch, rng, n, k):
    ops = open_hopper_ops("bfloat16")
    x, weight = upload(ops, random_rows(rng, 1, k)), repeated_rows(rng, n, k)
    weights, out = [upload(ops, weight) for _ in range(8)], ops.empty((1, n), ops.dtype)
    seconds = seconds_of(ops, [lambda weight=weight: launch(ops, x, weight, None, out) for weight in weights])
    report_bandwidth(f"few_rows_fp8_sm90 [1, {k}] @ [{n}, {k}].T", n * k, seconds)

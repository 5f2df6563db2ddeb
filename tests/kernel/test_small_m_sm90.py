"""The kernel for up to 128 rows on Hopper, with K whole and split; the reference is that of `linear`."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.weight import Weight
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [
    (64, 4400, 512),
    (17, 1000, 264),
    (33, 1, 8),
    (128, 96, 14336),
    (97, 333, 4136),
    (80, 8448, 104),
    (1, 17000, 520),
    (50, 4224, 1096),
]
"""M, N, K: whole tiles and rounds of them; ends of tiles, of K, and of both blocks' parts of K in the middle of all."""


@pytest.fixture(scope="module")
def cuda_linear():
    """The module that launches the kernel; it imports CUDA's packages."""
    return pytest.importorskip("model.ops.gpu.linear", reason="needs the packages of the cuda extra")


@pytest.fixture(params=[0, 1], ids=["whole", "split"])
def only_small_m(request, cuda_linear, open_hopper_ops, monkeypatch):
    """Name of a dtype, M, N -> the GPU backend, every product of which takes the kernel with K whole or split."""

    class Always(dict):
        def get(self, shape, default):
            return cuda_linear.GemmAlgorithm(cuda_linear.SMALL_M, request.param)

    def open_(dtype, m, n):
        ops = open_hopper_ops(dtype)
        split = cuda_linear.SMALL_M_SPLITS[request.param]
        if cuda_linear.small_m_build(split, m, n, ops.num_sms, ops.max_shared_bytes) is None:
            pytest.skip("more tiles than this split takes")
        monkeypatch.setattr(ops._linear, "_tuning", Always(any=0))
        return ops

    return open_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_product(only_small_m, rng, dtype, shape, with_bias, out_dtype):
    (m, n, k), reference = shape, NumpyOps(NUMPY_DTYPES[dtype])
    ops = only_small_m(dtype, m, n)
    x, weight = normal(rng, (m, k), dtype), normal(rng, (n, k), dtype, scale=k**-0.5)
    bias = normal(rng, (n,), dtype) if with_bias else None
    out_type = None if out_dtype is None else NUMPY_DTYPES[out_dtype]
    with ops.scratch():
        on_device = ops.upload(x), Weight(ops.upload(weight)), None if bias is None else ops.upload(bias)
        out = ops.download(ops.linear(*on_device, dtype=out_type))
        again = ops.download(ops.linear(*on_device, dtype=out_type))
    assert_close(out, reference.linear(x, Weight(weight), bias, dtype=out_type), out_dtype or dtype)
    np.testing.assert_array_equal(out.view(np.uint8), again.view(np.uint8))


@pytest.mark.parametrize("m", [17, 64, 65, 127])
def test_rows_past_the_last_are_neither_read_nor_written(only_small_m, rng, m):
    n, k = 1040, 520
    ops, reference = only_small_m("bfloat16", m, n), NumpyOps(NUMPY_DTYPES["bfloat16"])
    x, weight = normal(rng, (m + 9, k), "bfloat16"), normal(rng, (n + 9, k), "bfloat16", scale=k**-0.5)
    x[m:], weight[n:] = np.nan, np.nan
    kept = normal(rng, (m + 9, n), "bfloat16")
    out = ops.upload(kept)
    ops.linear(ops.upload(x)[:m], Weight(ops.upload(weight)[:n]), out=out[:m])
    found = ops.download(out)
    assert_close(found[:m], reference.linear(x[:m], Weight(weight[:n])), "bfloat16")
    np.testing.assert_array_equal(found[m:].view(np.uint16), kept[m:].view(np.uint16))


def test_kernels_of_a_graph_that_begin_early_still_wait_for_each_other(only_small_m, rng):
    """A chain in which each kernel reads what the one before wrote, and overwrites what the one before read."""
    m, width = 40, 2048
    ops, reference = only_small_m("bfloat16", m, width), NumpyOps(NUMPY_DTYPES["bfloat16"])
    x = normal(rng, (m, width), "bfloat16")
    weights = [normal(rng, (width, width), "bfloat16", scale=width**-0.5) for _ in range(6)]
    norm = normal(rng, (width,), "bfloat16")
    on_device, norm_on_device = [Weight(ops.upload(weight)) for weight in weights], ops.upload(norm)
    start, hidden, between = ops.upload(x), ops.empty(x.shape, ops.dtype), ops.empty(x.shape, ops.dtype)

    def work(to, also, some_ops, source, matrices, scale):
        to[...] = source
        for weight in matrices:
            with some_ops.scratch():
                some_ops.linear(to, weight, out=also)
                some_ops.linear(also, weight, out=to)
                some_ops.add_rms_norm(to, also, scale, 1e-5, out=to)

    def on_stream():
        with ops.stream:
            work(hidden, between, ops, start, on_device, norm_on_device)

    ops.is_poisoning = False
    try:
        replay = ops.capture(on_stream)
        results = []
        for _ in range(20):
            replay()
            results.append(ops.download(hidden))
    finally:
        ops.is_poisoning = True
    expected = np.empty_like(x)
    work(expected, np.empty_like(x), reference, x, [Weight(weight) for weight in weights], norm)
    assert_close(results[0], expected, "bfloat16")
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint16), results[0].view(np.uint16))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(32, 28672, 4096), (64, 28672, 4096), (128, 28672, 4096), (64, 4096, 14336), (64, 6144, 4096)]
)
def test_speed(only_small_m, m, n, k):
    ops = only_small_m("bfloat16", m, n)
    x = ops.empty((m, k), ops.dtype)
    weights = [Weight(ops.empty((n, k), ops.dtype)) for _ in range(4)]
    seconds = seconds_of(ops, [lambda weight=weight: ops.linear(x, weight) for weight in weights])
    report_bandwidth(f"small_m_sm90 [{m}, {k}] @ [{n}, {k}].T bf16", n * k * 2, seconds)

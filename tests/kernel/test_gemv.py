"""The kernel that reads weights for a few rows, in each of its builds; the reference is that of `linear`."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.weight import Weight
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 4400, 512),
    (8, 96, 14336),
    (3, 1, 8),
    (5, 1000, 264),
    (7, 33, 4136),
    (8, 9000, 104),
    (9, 4400, 512),
    (16, 96, 14336),
    (13, 1000, 264),
    (16, 33, 4136),
]
"""M, N, K: whole tiles, and ends of tiles and of K in the middle of everything. A build takes those it has rows for."""


@pytest.fixture(scope="module")
def cuda_linear():
    """The module that launches the kernel; it imports CUDA's packages."""
    return pytest.importorskip("model.ops.gpu.linear", reason="needs the packages of the cuda extra")


@pytest.fixture(params=range(3))
def only_gemv(request, cuda_linear, open_ops, monkeypatch):
    """Name of a dtype, rows -> the GPU backend, every product of which takes one build of the kernel."""

    class Always(dict):
        def get(self, shape, default):
            return cuda_linear.GemmAlgorithm(cuda_linear.GEMV, request.param)

    def open_(dtype, num_rows):
        ops = open_ops(dtype)
        if cuda_linear.GEMV_BUILDS[request.param].max_rows < num_rows:
            pytest.skip("more rows than this build takes")
        if cuda_linear.GEMV_BUILDS[request.param].shared_bytes > ops.max_shared_bytes:
            pytest.skip("this build needs more shared memory than the device has")
        monkeypatch.setattr(ops._linear, "_tuning", Always(any=0))
        return ops

    return open_


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_product(only_gemv, rng, dtype, shape, with_bias, out_dtype):
    (m, n, k), ops, reference = shape, only_gemv(dtype, shape[0]), NumpyOps(NUMPY_DTYPES[dtype])
    x, weight = normal(rng, (m, k), dtype), normal(rng, (n, k), dtype, scale=k**-0.5)
    bias = normal(rng, (n,), dtype) if with_bias else None
    out_type = None if out_dtype is None else NUMPY_DTYPES[out_dtype]
    with ops.scratch():
        on_device = ops.upload(x), Weight(ops.upload(weight)), None if bias is None else ops.upload(bias)
        out = ops.download(ops.linear(*on_device, dtype=out_type))
        again = ops.download(ops.linear(*on_device, dtype=out_type))
    assert_close(out, reference.linear(x, Weight(weight), bias, dtype=out_type), out_dtype or dtype)
    np.testing.assert_array_equal(out.view(np.uint8), again.view(np.uint8))


def test_kernels_of_a_graph_that_begin_early_still_wait_for_each_other(only_gemv, rng):
    """A chain in which each kernel reads what the one before wrote, and overwrites what the one before read."""
    ops, reference = only_gemv("bfloat16", 4), NumpyOps(NUMPY_DTYPES["bfloat16"])
    x = normal(rng, (4, 2048), "bfloat16")
    weights = [normal(rng, (2048, 2048), "bfloat16", scale=2048**-0.5) for _ in range(6)]
    norm = normal(rng, (2048,), "bfloat16")
    on_device, norm_on_device = [Weight(ops.upload(weight)) for weight in weights], ops.upload(norm)
    start, hidden = ops.upload(x), ops.empty(x.shape, ops.dtype)

    def work(to, some_ops, source, matrices, scale):
        to[...] = source
        for weight in matrices:
            with some_ops.scratch():
                product = some_ops.linear(to, weight)
                some_ops.add_rms_norm(product, to, scale, 1e-5, out=product)
                to[...] = some_ops.rms_norm(product, scale, 1e-5)

    def on_stream():
        with ops.stream:
            work(hidden, ops, start, on_device, norm_on_device)

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
    work(expected, reference, x, [Weight(weight) for weight in weights], norm)
    assert_close(results[0], expected, "bfloat16")
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint16), results[0].view(np.uint16))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (1, 28672, 4096), (8, 4096, 14336), (16, 28672, 4096)])
def test_speed(only_gemv, m, n, k):
    ops = only_gemv("bfloat16", m)
    x = ops.empty((m, k), ops.dtype)
    weights = [Weight(ops.empty((n, k), ops.dtype)) for _ in range(4)]
    seconds = seconds_of(ops, [lambda weight=weight: ops.linear(x, weight) for weight in weights])
    report_bandwidth(f"gemv [{m}, {k}] @ [{n}, {k}].T bf16", n * k * 2, seconds)

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.fp8_checks import assert_near_rows, assert_same_rows, download
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 33, 4096, 5120, 36992])
@pytest.mark.parametrize("rows", [1, 300])
def test_sum_and_norm(open_ops, rng, dtype, width, rows):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    x, residual = normal(rng, (rows, width), dtype), normal(rng, (rows, width), dtype, scale=3.0)
    weight = normal(rng, (width,), dtype)
    on_device = ops.upload(residual)
    with ops.scratch():
        found = download(ops, ops.add_rms_norm_quantised(ops.upload(x), on_device, ops.upload(weight), 1e-6))
    expected = reference.add_rms_norm_quantised(x, residual, weight, 1e-6)
    np.testing.assert_array_equal(ops.download(on_device).astype(np.float32), residual.astype(np.float32))
    assert_near_rows(found, expected)


@pytest.mark.parametrize("width", [2048, 4096])
def test_it_gives_the_bits_of_the_two_kernels_apart(open_ops, rng, width):
    ops = open_ops("bfloat16")
    x, weight = (ops.upload(normal(rng, shape, "bfloat16")) for shape in ((5, width), (width,)))
    residual = normal(rng, (5, width), "bfloat16")
    with ops.scratch():
        fused = download(ops, ops.add_rms_norm_quantised(x, ops.upload(residual), weight, 1e-5))
        apart = ops.quantise_rows(ops.add_rms_norm(x, ops.upload(residual), weight, 1e-5))
        assert_same_rows(fused, download(ops, apart))


def test_speed(open_ops, rng):
    ops, rows, width = open_ops("bfloat16"), 8192, 4096
    weight = ops.upload(normal(rng, (width,), "bfloat16"))
    inputs = [[ops.empty((rows, width), ops.dtype) for _ in range(2)] for _ in range(3)]
    seconds = seconds_of(ops, [lambda x=x, r=r: ops.add_rms_norm_quantised(x, r, weight, 1e-5) for x, r in inputs])
    report_bandwidth("add_rms_norm_quantised [8192, 4096] bf16", 7 * rows * width, seconds)

import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.fp8_checks import assert_near_rows, assert_same_rows, download
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 33, 4096, 5120, 36992])
@pytest.mark.parametrize("rows", [1, 300])
def test_norm(open_ops, rng, dtype, width, rows):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    x, weight = normal(rng, (rows, width), dtype, scale=3.0), normal(rng, (width,), dtype)
    with ops.scratch():
        found = download(ops, ops.rms_norm_quantised(ops.upload(x), ops.upload(weight), 1e-6))
    assert_near_rows(found, reference.rms_norm_quantised(x, weight, 1e-6))


@pytest.mark.parametrize("width", [2048, 4096])
def test_it_gives_the_bits_of_the_two_kernels_apart(open_ops, rng, width):
    ops = open_ops("bfloat16")
    x, weight = (ops.upload(normal(rng, shape, "bfloat16")) for shape in ((5, width), (width,)))
    with ops.scratch():
        fused = download(ops, ops.rms_norm_quantised(x, weight, 1e-5))
        assert_same_rows(fused, download(ops, ops.quantise_rows(ops.rms_norm(x, weight, 1e-5))))


def test_speed(open_ops, rng):
    ops, rows, width = open_ops("bfloat16"), 8192, 4096
    weight = ops.upload(normal(rng, (width,), "bfloat16"))
    inputs = [ops.empty((rows, width), ops.dtype) for _ in range(3)]
    seconds = seconds_of(ops, [lambda x=x: ops.rms_norm_quantised(x, weight, 1e-5) for x in inputs])
    report_bandwidth("rms_norm_quantised [8192, 4096] bf16", 3 * rows * width, seconds)

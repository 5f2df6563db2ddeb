import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu

WIDTHS = (8, 64, 100, 33, 896, 4096, 5120, 36992)
"""Odd ones take the path of single elements; the last is wider than a block holds in registers."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 300])
def test_norm(open_ops, rng, dtype, width, rows):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    x, weight = normal(rng, (rows, width), dtype, scale=3.0), normal(rng, (width,), dtype)
    with ops.scratch():
        out = ops.download(ops.rms_norm(ops.upload(x), ops.upload(weight), 1e-5))
    assert_close(out, reference.rms_norm(x, weight, 1e-5), dtype)


def test_no_rows_and_rows_of_zeros(open_ops, rng):
    ops = open_ops("bfloat16")
    weight = ops.upload(normal(rng, (64,), "bfloat16"))
    with ops.scratch():
        assert ops.rms_norm(ops.empty((0, 64), ops.dtype), weight, 1e-5).shape == (0, 64)
        zeros = normal(rng, (4, 64), "bfloat16", scale=0.0)
        assert not ops.download(ops.rms_norm(ops.upload(zeros), weight, 1e-5)).any()


def test_speed(open_ops, rng):
    ops, rows, width = open_ops("bfloat16"), 8192, 4096
    weight = ops.upload(normal(rng, (width,), "bfloat16"))
    inputs = [ops.empty((rows, width), ops.dtype) for _ in range(4)]
    seconds = seconds_of(ops, [lambda x=x: ops.rms_norm(x, weight, 1e-5) for x in inputs])
    report_bandwidth("rms_norm [8192, 4096] bf16", 2 * rows * width * 2, seconds)

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of

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
        out = ops.download(ops.add_rms_norm(ops.upload(x), on_device, ops.upload(weight), 1e-6))
    expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    np.testing.assert_array_equal(ops.download(on_device).astype(np.float32), residual.astype(np.float32))
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("width", [33, 4096])
def test_the_result_goes_where_it_is_asked_to_the_input_itself_included(open_ops, rng, width):
    ops, reference = open_ops("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])
    x, residual = normal(rng, (5, width), "bfloat16"), normal(rng, (5, width), "bfloat16")
    weight = normal(rng, (width,), "bfloat16")
    into = ops.upload(x)
    returned = ops.add_rms_norm(into, ops.upload(residual), ops.upload(weight), 1e-6, out=into)
    assert returned is into
    assert_close(ops.download(into), reference.add_rms_norm(x, residual, weight, 1e-6), "bfloat16")


def test_speed(open_ops, rng):
    ops, rows, width = open_ops("bfloat16"), 8192, 4096
    weight = ops.upload(normal(rng, (width,), "bfloat16"))
    inputs = [[ops.empty((rows, width), ops.dtype) for _ in range(3)] for _ in range(3)]
    launches = [lambda x=x, r=r, out=out: ops.add_rms_norm(x, r, weight, 1e-5, out=out) for x, r, out in inputs]
    report_bandwidth("add_rms_norm [8192, 4096] bf16", 4 * rows * width * 2, seconds_of(ops, launches))

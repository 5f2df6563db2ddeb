import math

import numpy as np
import pytest

from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


def launch(ops, out, bias) -> None:
    rows, width = out.shape
    grid = (rows, math.ceil(width / 256))
    ops.launch("add_bias", grid, (out, bias, np.int32(width)), OUT_FLOAT=int(out.dtype == np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 255, 4096])
@pytest.mark.parametrize("is_wide", [False, True])
def test_bias(open_ops, rng, dtype, width, is_wide):
    ops = open_ops(dtype)
    out_dtype = "float32" if is_wide else dtype
    out, bias = normal(rng, (9, width), out_dtype), normal(rng, (width,), dtype)
    on_device = ops.upload(out)
    launch(ops, on_device, ops.upload(bias))
    expected = (out.astype(np.float32) + bias.astype(np.float32)).astype(NUMPY_DTYPES[out_dtype])
    assert_close(ops.download(on_device), expected, out_dtype)


def test_speed(open_ops, rng):
    ops, rows, width = open_ops("bfloat16"), 8192, 4096
    bias = ops.upload(normal(rng, (width,), "bfloat16"))
    outs = [ops.empty((rows, width), np.float32) for _ in range(2)]
    seconds = seconds_of(ops, [lambda out=out: launch(ops, out, bias) for out in outs])
    report_bandwidth("add_bias [8192, 4096] float32", 2 * rows * width * 4, seconds)

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.fp8_checks import assert_same_rows, download
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 100, 2049, 4096, 14336, 40000])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_every_bit_is_the_references(open_ops, rng, dtype, width, rows):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    x = normal(rng, (rows, width), dtype, scale=3.0)
    with ops.scratch():
        assert_same_rows(download(ops, ops.quantise_rows(ops.upload(x))), reference.quantise_rows(x))


@pytest.mark.parametrize("width", [100, 4096])
def test_rows_of_zeros_of_tiny_of_huge_and_of_broken_numbers(open_ops, rng, width):
    ops, reference = open_ops("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])
    x = normal(rng, (6, width), "bfloat16")
    x[0] = 0
    x[1] = x[1].astype(np.float32) * 1e-37
    x[2] = x[2].astype(np.float32) * 1e37
    x[3, width // 2] = np.nan
    x[4, width // 2] = -np.inf
    with ops.scratch():
        found = download(ops, ops.quantise_rows(ops.upload(x)))
    assert_same_rows(found, reference.quantise_rows(x))
    np.testing.assert_array_equal(np.isfinite(found.scale), [True, True, True, False, False, True])


def test_speed(open_ops):
    ops, rows, width = open_ops("bfloat16"), 8192, 4096
    inputs = [ops.empty((rows, width), ops.dtype) for _ in range(3)]
    seconds = seconds_of(ops, [lambda x=x: ops.quantise_rows(x) for x in inputs])
    report_bandwidth("quantise_rows [8192, 4096] bf16", 3 * rows * width, seconds)

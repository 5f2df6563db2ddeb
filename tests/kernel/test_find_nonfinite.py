import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUM_DRAWN, NUMPY_DTYPES, normal, repeated, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 8, 2049, 1_000_003])
@pytest.mark.parametrize("skipped", [0, 1])
def test_one_element_anywhere_is_found(open_ops, rng, dtype, count, skipped):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    host = normal(rng, (count + skipped,), dtype)
    for value in (0.0, np.finfo(np.float16).max, np.nan, np.inf, -np.inf):
        for place in {skipped, skipped + count // 2, skipped + count - 1}:
            changed = host.copy()
            changed[place] = value
            changed[:skipped] = np.nan  # before x begins
            found, expected = ops.upload(np.zeros(2, np.int32)), np.zeros(2, np.int32)
            ops.find_nonfinite(ops.upload(changed)[skipped:], found[1:])
            reference.find_nonfinite(changed[skipped:], expected[1:])
            np.testing.assert_array_equal(ops.download(found), expected)
            assert expected[1] == (not np.isfinite(value))


@pytest.mark.parametrize("count", [1, 15, 16, 2049, 1_000_003])
@pytest.mark.parametrize("skipped", [0, 1])
def test_one_nan_among_bits_of_e4m3_is_found(open_ops, rng, count, skipped):
    ops, reference = open_ops("bfloat16"), NumpyOps(NUMPY_DTYPES["bfloat16"])
    host = rng.integers(0, 256, count + skipped, np.uint8) & np.uint8(0xF7)
    for value in (0, 0x7E, 0x7F, 0x80, 0xFE, 0xFF):
        for place in {skipped, skipped + count // 2, skipped + count - 1}:
            changed = host.copy()
            changed[place] = value
            changed[:skipped] = 0x7F  # before x begins
            found, expected = ops.upload(np.zeros(2, np.int32)), np.zeros(2, np.int32)
            ops.find_nonfinite(ops.upload(changed)[skipped:], found[1:])
            reference.find_nonfinite(changed[skipped:], expected[1:])
            np.testing.assert_array_equal(ops.download(found), expected)
            assert expected[1] == (value & 0x7F == 0x7F)


def test_speed(open_ops, rng):
    """Llama-3.1-8B: the matrix of gate and up."""
    ops = open_ops("bfloat16")
    host, found = repeated(normal(rng, (NUM_DRAWN, 4096), "bfloat16"), 28672, 4096), ops.upload(np.zeros(1, np.int32))
    seconds = seconds_of(ops, [lambda x=x: ops.find_nonfinite(x, found) for x in (ops.upload(host), ops.upload(host))])
    report_bandwidth("find_nonfinite 28672 x 4096", host.nbytes, seconds)

import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 100, 2049, 14336])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_product(open_ops, rng, dtype, width, rows):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    gate_up = normal(rng, (rows, 2 * width), dtype, scale=4.0)
    with ops.scratch():
        out = ops.download(ops.silu_mul(ops.upload(gate_up)))
    assert_close(out, reference.silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gates_neither_overflow_nor_turn_into_nan(open_ops, rng, dtype):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    gate_up = normal(rng, (3, 256), dtype)
    gate_up[:, :128] *= 1000
    with ops.scratch():
        out = ops.download(ops.silu_mul(ops.upload(gate_up)))
    assert_close(out, reference.silu_mul(gate_up), dtype)


def test_speed(open_ops):
    ops, rows, width = open_ops("bfloat16"), 4096, 14336
    inputs = [ops.empty((rows, 2 * width), ops.dtype) for _ in range(3)]
    seconds = seconds_of(ops, [lambda x=x: ops.silu_mul(x) for x in inputs])
    report_bandwidth("silu_mul [4096, 2 x 14336] bf16", 3 * rows * width * 2, seconds)

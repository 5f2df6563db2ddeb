import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.fp8_checks import assert_near_rows, assert_same_rows, download
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, normal, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 100, 2049, 14336, 40000])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_product(open_ops, rng, dtype, width, rows):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    gate_up = normal(rng, (rows, 2 * width), dtype, scale=4.0)
    with ops.scratch():
        found = download(ops, ops.silu_mul_quantised(ops.upload(gate_up)))
    assert_near_rows(found, reference.silu_mul_quantised(gate_up))


@pytest.mark.parametrize("width", [100, 14336])
def test_it_gives_the_bits_of_the_two_kernels_apart(open_ops, rng, width):
    ops = open_ops("bfloat16")
    gate_up = normal(rng, (7, 2 * width), "bfloat16")
    gate_up[:2, :width] *= 1000
    on_device = ops.upload(gate_up)
    with ops.scratch():
        fused = download(ops, ops.silu_mul_quantised(on_device))
        assert_same_rows(fused, download(ops, ops.quantise_rows(ops.silu_mul(on_device))))


def test_speed(open_ops):
    ops, rows, width = open_ops("bfloat16"), 4096, 14336
    inputs = [ops.empty((rows, 2 * width), ops.dtype) for _ in range(3)]
    seconds = seconds_of(ops, [lambda x=x: ops.silu_mul_quantised(x) for x in inputs])
    report_bandwidth("silu_mul_quantised [4096, 2 x 14336] bf16", 5 * rows * width, seconds)

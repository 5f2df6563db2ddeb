import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.quantised import dequantise
from model.ops.fp8 import widen
from model.ops.interface import Fp8Rows
from tests.support.fp8_checks import random_rows, upload
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, report_bandwidth, seconds_of
from tests.support.w8_checks import KINDS, random_w8, upload_w8

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 100, 4096, 14336])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_every_bit_is_the_references(open_ops, rng, dtype, width, rows):
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    x = random_rows(rng, rows, width)
    with ops.scratch():
        found = ops.download(ops.dequantise_rows(upload(ops, x)))
    np.testing.assert_array_equal(found, reference.dequantise_rows(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (130, 272), (129, 100), (256, 14336)])
def test_8_bit_weights(open_ops, rng, dtype, kind, n, k):
    dequantise_weight = pytest.importorskip("model.ops.gpu.w8.linear").dequantise_weight
    ops, weight = open_ops(dtype), random_w8(rng, n, k, kind)
    with ops.scratch():
        found = ops.download(dequantise_weight(ops, upload_w8(ops, weight)))
    np.testing.assert_array_equal(found, dequantise(weight).astype(ops.dtype))


def test_all_codes(open_ops):
    ops = open_ops("float32")
    codes = Fp8Rows(np.arange(256, dtype=np.uint8)[None], np.ones(1, np.float32))
    with ops.scratch():
        found = ops.download(ops.dequantise_rows(upload(ops, codes)))
    np.testing.assert_array_equal(found, widen(codes.data))


def test_speed(open_ops):
    ops, rows, width = open_ops("bfloat16"), 8192, 4096
    inputs = [Fp8Rows(ops.upload(np.zeros((rows, width), np.uint8)), ops.empty((rows,), np.float32)) for _ in range(3)]
    seconds = seconds_of(ops, [lambda x=x: ops.dequantise_rows(x) for x in inputs])
    report_bandwidth("dequantise_rows [8192, 4096] bf16", 3 * rows * width, seconds)

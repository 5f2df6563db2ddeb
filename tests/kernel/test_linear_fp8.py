"""Products with weights in e4m3, whichever way they are computed."""

import numpy as np
import pytest

from model.ops.interface import Fp8Rows
from tests.support.fp8_checks import as_weight, assert_product, random_rows, upload
from tests.support.kernel_checks import DTYPES, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["16 bits", "e4m3"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 512, 256),
        (16, 1000, 272),
        (17, 512, 256),
        (257, 1024, 4096),
        (600, 1008, 272),
        (300, 1001, 272),
        (5, 64, 72),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(open_ops, rng, dtype, kind, m, n, k, with_bias):
    ops, weight = open_ops(dtype), random_rows(rng, n, k)
    x = random_rows(rng, m, k) if kind == "e4m3" else normal(rng, (m, k), dtype)
    bias = normal(rng, (n,), dtype) if with_bias else None
    for out_dtype in (None, np.dtype(np.float32)):
        with ops.scratch():
            on_device = upload(ops, x), as_weight(upload(ops, weight)), None if bias is None else ops.upload(bias)
            out = ops.download(ops.linear(*on_device, dtype=out_dtype))
        assert out.dtype == (out_dtype or ops.dtype)
        assert_product(out, x, weight, bias)


@pytest.mark.parametrize("m", [3, 40, 300])
def test_a_row_with_nan_or_infinity_stays_broken_and_alone(open_ops, rng, m):
    ops, weight = open_ops("bfloat16"), random_rows(rng, 512, 256)
    x = normal(rng, (m, 256), "bfloat16")
    x[1, 7], x[2, 9] = np.nan, np.inf
    there = as_weight(upload(ops, weight))
    with ops.scratch():
        out = ops.download(ops.linear(ops.quantise_rows(ops.upload(x)), there)).astype(np.float32)
    np.testing.assert_array_equal(np.isfinite(out).all(axis=1), [row not in (1, 2) for row in range(m)])


def test_products_of_more_rows_in_a_graph(open_ops, rng):
    m, n, k, ops = 384, 1024, 512, open_ops("bfloat16")
    x, weight = random_rows(rng, m, k), random_rows(rng, n, k)
    on_device, out = (upload(ops, x), as_weight(upload(ops, weight))), ops.empty((m, n), ops.dtype)
    replay = ops.capture(lambda: ops.linear(*on_device, out=out))
    out.data.memset_async(0xFF, out.nbytes, ops.stream)
    replay()
    assert_product(ops.download(out), x, weight, None)


@pytest.mark.parametrize("what", ["width", "scales", "dtype"])
def test_what_does_not_fit_is_refused(open_ops, rng, what):
    ops, weight = open_ops("bfloat16"), random_rows(rng, 64, 128)
    x = random_rows(rng, 3, 128 if what != "width" else 112)
    if what == "scales":
        x = Fp8Rows(x.data, x.scale[:2])
    if what == "dtype":
        x = Fp8Rows(x.data.astype(np.int8), x.scale)
    with pytest.raises(ValueError, match="expected"):
        ops.linear(upload(ops, x), as_weight(upload(ops, weight)))

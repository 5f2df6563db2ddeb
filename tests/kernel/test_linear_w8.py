"""Products with 8-bit weights and 16-bit inputs, whichever way they are computed."""

import numpy as np
import pytest

from model.ops.cpu.quantised import linear_quantised
from model.ops.weight import WeightFormat
from tests.support.int4_checks import assert_product
from tests.support.kernel_checks import DTYPES, normal
from tests.support.w8_checks import KINDS, random_w8, upload_w8, w8_in_float64

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 512, 256), (8, 1000, 272), (9, 512, 256), (17, 1000, 272), (257, 1024, 4096), (800, 1008, 272), (5, 64, 72)],
)
def test_product(open_ops, rng, dtype, kind, m, n, k):
    ops, weight = open_ops(dtype), random_w8(rng, n, k, kind)
    x, bias = normal(rng, (m, k), dtype), normal(rng, (n,), dtype)
    for out_dtype in (None, np.dtype(np.float32)):
        with ops.scratch():
            out = ops.download(ops.linear(ops.upload(x), upload_w8(ops, weight), ops.upload(bias), dtype=out_dtype))
        assert out.dtype == (out_dtype or ops.dtype)
        assert_product(out, x, w8_in_float64(weight), bias, 5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_computes_the_same(rng, kind):
    weight, x = random_w8(rng, 300, 200, kind), normal(rng, (7, 200), "bfloat16")
    assert_product(linear_quantised(x, weight), x, w8_in_float64(weight), None, 1e-5)


def test_weights_stay_as_loaded_and_int8_inputs_are_not_rounded(open_ops, rng, caplog):
    ops = open_ops("bfloat16")
    with caplog.at_level("INFO"):
        for kind in KINDS:
            weight = random_w8(rng, 256, 256, kind)
            assert upload_w8(ops, weight).format is kind
    assert "dequantised" not in caplog.text


@pytest.mark.parametrize("what", ["scale", "data"])
def test_what_does_not_fit_is_refused(open_ops, rng, what):
    ops, weight = open_ops("bfloat16"), random_w8(rng, 256, 256, WeightFormat.FP8_BLOCK)
    there = upload_w8(ops, weight)
    object.__setattr__(there, what, getattr(there, what)[:, :1].copy())
    with pytest.raises(ValueError, match="expected"):
        ops.linear(ops.upload(normal(rng, (3, 256), "bfloat16")), there)

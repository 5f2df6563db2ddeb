"""The kernel that writes packed 4-bit weights in the dtype of the activations; the reference is float64, rounded."""

import numpy as np
import pytest

from tests.support.int4_checks import in_float64, random_int4, upload_int4
from tests.support.kernel_checks import DTYPES, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def launch(open_ops):
    """ops, weight -> the matrix on the device."""
    reason = "needs the packages of the cuda extra"
    linear = pytest.importorskip("model.ops.gpu.int4.linear", reason=reason, exc_type=ImportError).Int4Linear
    return lambda ops, weight: linear(ops, None).unpack(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (4400, 640), (48, 14336)])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(("has_zeros", "scales"), [(False, "bfloat16"), (True, "float16")])
def test_every_weight_is_rounded_once(open_ops, launch, rng, dtype, n, k, group_size, has_zeros, scales):
    ops, weight = open_ops(dtype), random_int4(rng, (n, k), group_size or k, has_zeros=has_zeros, scales=scales)
    with ops.scratch():
        out = ops.download(launch(ops, ops.prepare_weight(upload_int4(ops, weight))))
    # float32 holds the product of an integer and a 16-bit scale exactly
    expected = in_float64(weight).astype(np.float32).astype(ops.dtype)
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


def test_speed(open_ops, launch, rng):
    n, k, ops = 28672, 4096, open_ops("bfloat16")
    weight = random_int4(rng, (n, k), 128)
    weights = [ops.prepare_weight(upload_int4(ops, weight)) for _ in range(4)]
    seconds = seconds_of(ops, [lambda weight=weight: launch(ops, weight) for weight in weights])
    report_bandwidth(f"unpack_int4 [{n}, {k}]", weights[0].nbytes + 2 * n * k, seconds)

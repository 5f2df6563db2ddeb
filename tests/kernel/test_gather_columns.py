"""The kernel that permutes the columns of activations; the reference is NumPy's indexing."""

import numpy as np
import pytest

from tests.support.int4_checks import assert_product, in_float64, random_int4, upload_int4
from tests.support.kernel_checks import DTYPES, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 12, 40, 300, 1100])
def test_products_with_sorted_columns(open_ops, rng, dtype, m):
    """Every way to multiply: few rows, more, and enough that weights are unpacked."""
    n, k, ops = 528, 640, open_ops(dtype)
    weight, x = random_int4(rng, (n, k), 128, has_zeros=True, is_ordered=True), normal(rng, (m, k), dtype)
    with ops.scratch():
        out = ops.download(ops.linear(ops.upload(x), ops.prepare_weight(upload_int4(ops, weight))))
    tolerance = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 6e-3}[dtype]
    assert_product(out, x, in_float64(weight), None, tolerance)


def test_columns_outside_give_zeros(open_ops, rng):
    ops, k = open_ops("bfloat16"), 300
    x, order = normal(rng, (3, k), "bfloat16"), rng.permutation(k).astype(np.int32)
    order[[5, 7]] = -1, k
    out = ops.empty((3, k), ops.dtype)
    ops.launch("gather_columns", (3, 2), (ops.upload(x), ops.upload(order), out, np.int32(k)))
    expected = np.where((order >= 0) & (order < k), x[:, order.clip(0, k - 1)].astype(np.float32), 0)
    np.testing.assert_array_equal(ops.download(out).astype(np.float32), expected)

"""The kernel that arranges 4-bit weights; the reference is `model.ops.int4.tile`."""

import numpy as np
import pytest

from model.ops.int4 import tile
from tests.support.int4_checks import random_int4, upload_int4

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("n", "k"), [(16, 128), (4400, 512), (48, 14336)])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 128])
def test_every_bit(open_ops, rng, n, k, has_zeros, group_size):
    ops, weight = open_ops("bfloat16"), random_int4(rng, (n, k), group_size, has_zeros=has_zeros)
    packed, expected = ops.prepare_weight(upload_int4(ops, weight)), tile(weight)
    assert packed.shape == weight.shape
    np.testing.assert_array_equal(ops.download(packed.data), expected.data)
    np.testing.assert_array_equal(ops.download(packed.scale).view(np.uint16), expected.scale.view(np.uint16))
    if has_zeros:
        np.testing.assert_array_equal(ops.download(packed.zero_point), expected.zero_point)
    else:
        assert packed.zero_point is None

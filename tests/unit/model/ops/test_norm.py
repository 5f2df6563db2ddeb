"""A norm and its product equal the single operations."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.weight import Weight


@pytest.mark.parametrize("with_out", [False, True])
def test_the_product_is_of_the_norm_of_the_sum(with_out):
    ops, rng = NumpyOps(np.dtype(np.float32)), np.random.default_rng(0)
    x, residual, weight, bias = (rng.standard_normal(shape, np.float32) for shape in ((1, 6), (1, 6), (4, 6), (4,)))
    norm, held = rng.standard_normal(6, np.float32), residual.copy()
    out = np.zeros((1, 4), np.float32) if with_out else None
    found = ops.add_norm_linear(x, held, (norm, 1e-5), Weight(weight), bias, out)
    total = residual + x
    wanted = total / np.sqrt(np.mean(total**2) + 1e-5) * norm @ weight.T + bias
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_array_equal(held, total)
    assert out is None or found is out

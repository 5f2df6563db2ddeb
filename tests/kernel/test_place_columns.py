import numpy as np
import pytest

from tests.support.kernel_checks import DTYPES, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out_width", "first"), [(64, 192, 128), (4096, 12288, 4096), (5, 17, 3), (8, 20, 8)])
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_columns_are_copied_and_others_left(open_ops, rng, dtype, width, out_width, first, num_rows):
    ops = open_ops(dtype)
    x, out = normal(rng, (num_rows, width), dtype), normal(rng, (num_rows, out_width), dtype)
    placed = ops.upload(out)
    ops.place_columns(ops.upload(x), placed, first)
    out[:, first : first + width] = x
    np.testing.assert_array_equal(ops.download(placed).view(np.uint8), out.view(np.uint8))


def test_columns_beyond_the_rows_are_refused(open_ops):
    ops = open_ops("bfloat16")
    x = ops.empty((2, 8), ops.dtype)
    with pytest.raises(ValueError, match="place_columns: 8 columns at 16 of 20"):
        ops.place_columns(x, ops.empty((2, 20), ops.dtype), 16)

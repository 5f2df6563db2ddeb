import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 4096, 5, 9000])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_both_halves_are_normed(open_ops, rng, dtype, width, num_rows):
    """An unknown id gives zeros next to its hidden state."""
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    table, hidden = normal(rng, (37, width), dtype), normal(rng, (num_rows, width), dtype)
    weights = normal(rng, (width,), dtype), normal(rng, (width,), dtype)
    ids = rng.integers(-3, 40, num_rows).astype(np.int32)
    with ops.scratch():
        sent = [ops.upload(one) for one in (ids, table, hidden)]
        got = ops.download(ops.draft_input(*sent, tuple(map(ops.upload, weights)), 1e-5))
    assert_close(got, reference.draft_input(ids, table, hidden, weights, 1e-5), dtype)

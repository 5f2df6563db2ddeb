import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("num_columns", "vocab_size"), [(1, 1), (50, 1025), (32000, 128256)])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_known_tokens_keep_their_logits_and_others_cannot_be_drawn(open_ops, rng, num_columns, vocab_size, num_rows):
    ops, reference = open_ops("bfloat16"), NumpyOps(np.dtype(np.float32))
    logits = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
    columns = rng.integers(-2, num_columns + 2, vocab_size).astype(np.int32)
    with ops.scratch():
        got = ops.download(ops.spread_logits(ops.upload(logits), ops.upload(columns)))
    np.testing.assert_array_equal(got, reference.spread_logits(logits, columns))

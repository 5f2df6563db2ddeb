import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_tokens", [0, 1, 256, 1000])
def test_known_sources_are_picked_and_others_left(open_ops, rng, num_tokens):
    ops, reference = open_ops("bfloat16"), NumpyOps(np.dtype(np.float32))
    token_ids, previous = (rng.integers(0, 1000, size).astype(np.int32) for size in (num_tokens, 300))
    source = rng.integers(-5, 320, num_tokens).astype(np.int32)
    source[:1] = np.iinfo(np.int32).max
    picked = ops.upload(token_ids)
    ops.pick_tokens(picked, ops.upload(previous), ops.upload(source))
    reference.pick_tokens(token_ids, previous, source)
    np.testing.assert_array_equal(ops.download(picked), token_ids)

"""sample_part against NumpyOps.sample_part: the same tokens, scores and ties, also of parts that begin anywhere."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.sampling_cases import random_bias, random_options, random_penalties, uploaded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("vocab", "first"), [(1000, 0), (64128, 64128), (333, 7), (4096, 4098)])
@pytest.mark.parametrize("shaped", [False, True])
def test_the_best_of_a_part(open_ops, rng, vocab, first, shaped):
    rank = pytest.importorskip("model.ops.gpu.group.rank")
    ops = rank.CudaRank(0, np.dtype(np.float32))
    logits = (4 * rng.standard_normal((32, vocab))).astype(np.float32)
    logits[0, 5], logits[1], logits[2, 3] = np.nan, -np.inf, np.inf
    whole = first + vocab
    more = {"penalties": random_penalties(rng, 32, whole), "bias": random_bias(rng, 32, whole)} if shaped else {}
    off = {
        "top_k": np.full(32, 2**31 - 1, np.int32),
        "top_p": np.ones(32, np.float32),
        "min_p": np.zeros(32, np.float32),
    }
    options = random_options(rng, 32, whole, **off, **more)
    expected = NumpyOps().sample_part(logits, options, first)
    with ops.scratch():
        found = ops.sample_part(ops.upload(logits), uploaded(options, ops.upload), first)
        np.testing.assert_allclose(ops.download(found.score), expected.score, rtol=1e-6)
        np.testing.assert_array_equal(ops.download(found.tie), expected.tie)
        known = np.isfinite(expected.score)
        np.testing.assert_array_equal(ops.download(found.token_ids)[known], expected.token_ids[known])

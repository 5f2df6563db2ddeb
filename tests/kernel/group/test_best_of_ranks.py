"""Sampling by parts of the vocabulary: the tokens of one rank."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.group.arrays import Section, Split, SplitArray
from tests.support.group_checks import on_ranks
from tests.support.sampling_cases import random_bias, random_mask, random_options, random_penalties, uploaded

pytestmark = pytest.mark.gpu
ROWS = 64


def divided(ops, logits):
    split = Split(1, (Section(logits.shape[1]),))
    parts = [np.ascontiguousarray(split.part_of(logits, rank, ops.num_ranks)) for rank in range(ops.num_ranks)]
    width = split.part_size(ops.num_ranks)
    padded = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=np.nan) for part in parts]
    return SplitArray(on_ranks(ops, padded).parts, split)


def edge_logits(rng, vocab):
    logits = (4 * rng.standard_normal((ROWS, vocab))).astype(np.float32)
    logits[0, 7], logits[1], logits[2, -1] = np.nan, -np.inf, np.inf
    logits[3, ::2] = logits[3].max()
    logits[4, : vocab // 2] = -np.inf
    logits[5:12] *= np.float32(1e30)
    return logits


@pytest.mark.parametrize("vocab", [1600, 32000, 128256, 1003])
@pytest.mark.parametrize("kind", ["plain", "penalised", "thresholds", "masked", "logprobs"])
def test_tokens_match_one_rank(open_group, rng, vocab, kind):
    ops, logits = open_group("float32"), edge_logits(rng, vocab)
    off = {"top_k": np.full(ROWS, 2**31 - 1, np.int32), "top_p": np.ones(ROWS, np.float32), "has_thresholds": False}
    off["min_p"] = np.zeros(ROWS, np.float32)
    more = {
        "plain": off,
        "penalised": {**off, "penalties": random_penalties(rng, ROWS, vocab), "bias": random_bias(rng, ROWS, vocab)},
        "thresholds": {},
        "masked": {**off, "mask": random_mask(rng, ROWS, vocab)},
        "logprobs": {**off, "with_logprobs": True, "num_logprobs": 5},
    }[kind]
    options = random_options(rng, ROWS, vocab, **more)
    expected, out = NumpyOps().sample(logits, options), ops.empty((ROWS,), np.dtype(np.int32))
    with ops.scratch():
        sampled = ops.sample(divided(ops, logits), uploaded(options, ops.upload), out)
        np.testing.assert_array_equal(ops.download(sampled.is_nan), expected.is_nan)
        np.testing.assert_array_equal(ops.download(out), expected.token_ids)

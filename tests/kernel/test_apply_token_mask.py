"""apply_token_mask against its reference `forbid`: equal to the last bit, in place and into a copy."""

import math

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.sampling import forbid
from model.ops.interface import TokenMask
from tests.support.kernel_checks import report_bandwidth, seconds_of
from tests.support.sampling_cases import random_mask, random_options, uploaded

pytestmark = pytest.mark.gpu


def launch(ops, logits, adjusted, mask: TokenMask) -> None:
    rows, vocab = logits.shape
    sizes = map(np.int32, (*mask.words.shape, vocab))
    args = (logits, adjusted, mask.rows, mask.words, *sizes)
    ops.launch("apply_token_mask", (rows, math.ceil(vocab / 4096)), args, threads=256, QUIRE_DTYPE=0)


@pytest.mark.parametrize("vocab", [1, 33, 4096, 32003, 151936])
@pytest.mark.parametrize("in_place", [False, True])
def test_forbidden_tokens(open_ops, rng, vocab, in_place):
    ops, rows = open_ops("float32"), 7
    logits = (rng.standard_normal((rows, vocab)) * 5).astype(np.float32)
    logits[0, ::7] = -np.inf
    mask = random_mask(rng, rows, vocab)

    with ops.scratch():
        given = ops.upload(logits)
        adjusted = given if in_place else ops.temporary(logits.shape, np.float32)
        launch(ops, given, adjusted, TokenMask(ops.upload(mask.rows), ops.upload(mask.words)))
        got, left = ops.download(adjusted), ops.download(given)

    expected = logits.copy()
    forbid(expected, mask)
    np.testing.assert_array_equal(got, expected)
    if not in_place:
        np.testing.assert_array_equal(left, logits)


@pytest.mark.parametrize("vocab", [4096, 32003])
def test_sampling_under_a_mask(open_ops, rng, vocab):
    """All of `sample`: only allowed tokens are drawn, for any mask and parameters."""
    ops, rows = open_ops("float32"), 48
    logits = (rng.standard_normal((rows, vocab)) * 5).astype(np.float32)
    options = random_options(rng, rows, vocab, mask=random_mask(rng, rows, vocab))
    with ops.scratch():
        sampled = ops.sample(ops.upload(logits), uploaded(options, ops.upload))
        got, is_nan = ops.download(sampled.token_ids), ops.download(sampled.is_nan)
    expected = NumpyOps().sample(logits, options)
    np.testing.assert_array_equal(is_nan, expected.is_nan)
    allowed = logits.copy()
    forbid(allowed, options.mask)
    assert np.isfinite(allowed[np.arange(rows), got])[~is_nan].all()
    assert np.count_nonzero(got != expected.token_ids) <= 1  # a draw within a rounding of its rival


def test_speed(open_ops, rng):
    ops, rows, vocab = open_ops("float32"), 256, 151936
    words = ops.upload(rng.integers(0, 2**32, (rows, vocab // 32), np.uint32, endpoint=False))
    mask = TokenMask(ops.upload(np.arange(rows, dtype=np.int32)), words)
    logits, adjusted = ops.empty((rows, vocab), np.float32), ops.empty((rows, vocab), np.float32)
    seconds = seconds_of(ops, [lambda: launch(ops, logits, adjusted, mask)])
    report_bandwidth("apply_token_mask [256, 151936]", 2 * logits.nbytes, seconds)

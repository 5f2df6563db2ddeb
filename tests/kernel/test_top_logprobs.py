"""top_logprobs against NumpyOps.top_logprobs, alone and as a part of sampling."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import assert_close, report_bandwidth, seconds_of
from tests.support.sampling_cases import random_bias, random_options, random_penalties, uploaded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [1, 3, 4096, 32003, 151936])
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20, 36])
@pytest.mark.parametrize("spread", [0.5, 4])
def test_best_tokens_and_the_chosen_one(open_ops, rng, vocab, num_logprobs, spread):
    """Logits are multiples of 1/64: many tie, and none that differ have the same rounded log-probability."""
    ops, rows = open_ops("float32"), 8
    logits = (np.round(rng.standard_normal((rows, vocab)) * spread * 64) / 64).astype(np.float32)
    logits[0] = 2.0
    logits[1, vocab // 2 + 1 :] = -np.inf
    options = random_options(rng, rows, vocab, num_logprobs=num_logprobs, with_logprobs=True)
    expected = NumpyOps().sample(logits, options)
    with ops.scratch():
        sampled = ops.sample(ops.upload(logits), uploaded(options, ops.upload))
        chosen, top_ids, top = map(ops.download, (sampled.logprobs, sampled.top_ids, sampled.top_logprobs))
    assert_close(chosen, expected.logprobs, "float32")
    np.testing.assert_array_equal(top_ids, expected.top_ids)
    assert top.shape == expected.top_logprobs.shape == (rows, min(num_logprobs, vocab))
    np.testing.assert_allclose(top, expected.top_logprobs, rtol=1e-5, atol=1e-5)


def test_of_adjusted_logits_if_requested(open_ops, rng):
    ops, rows, vocab = open_ops("float32"), 6, 4096
    logits = (np.round(rng.standard_normal((rows, vocab)) * 64) / 64).astype(np.float32)
    shape = {"bias": random_bias(rng, rows, vocab), "penalties": random_penalties(rng, rows, vocab)}
    options = random_options(rng, rows, vocab, num_logprobs=8, with_logprobs=True, adjusts_logprobs=True, **shape)
    expected = NumpyOps().sample(logits, options)
    raw = NumpyOps().sample(logits, random_options(rng, rows, vocab, num_logprobs=8, with_logprobs=True))
    assert not np.allclose(expected.top_logprobs, raw.top_logprobs, atol=1e-2)
    with ops.scratch():
        sampled = ops.sample(ops.upload(logits), uploaded(options, ops.upload))
        chosen, top = map(ops.download, (sampled.logprobs, sampled.top_logprobs))
    assert_close(chosen, expected.logprobs, "float32")
    np.testing.assert_allclose(top, expected.top_logprobs, rtol=1e-5, atol=1e-5)


def test_a_nan_stays_in_its_row(open_ops, rng):
    ops, rows, vocab = open_ops("float32"), 3, 5000
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    logits[1, 4321] = np.nan
    options = random_options(rng, rows, vocab, num_logprobs=4, with_logprobs=True)
    expected = NumpyOps().sample(logits, options)
    with ops.scratch():
        sampled = ops.sample(ops.upload(logits), uploaded(options, ops.upload))
        chosen, top = ops.download(sampled.logprobs), ops.download(sampled.top_logprobs)
    assert np.isnan(chosen[1])
    assert np.isnan(top[1]).all()
    assert_close(chosen[[0, 2]], expected.logprobs[[0, 2]], "float32")
    np.testing.assert_allclose(top[[0, 2]], expected.top_logprobs[[0, 2]], rtol=1e-5)


@pytest.mark.parametrize("num_best", [0, 1, 20])
def test_tokens_that_were_not_sampled(open_ops, rng, num_best):
    ops, rows, vocab = open_ops("float32"), 6, 32003
    logits = (np.round(rng.standard_normal((rows, vocab)) * 128) / 64).astype(np.float32)
    token_ids = rng.integers(0, vocab, rows).astype(np.int32)
    expected = NumpyOps().top_logprobs(logits, token_ids, num_best)
    with ops.scratch():
        got = [ops.download(one) for one in ops.top_logprobs(ops.upload(logits), ops.upload(token_ids), num_best)]
    assert_close(got[0], expected[0], "float32")
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_allclose(got[2], expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 256])
def test_speed(open_ops, rng, rows):
    ops, vocab = open_ops("float32"), 151936
    logits = ops.upload(rng.standard_normal((rows, vocab), np.float32))
    greedy = np.zeros(rows, np.float32)
    options = uploaded(
        random_options(rng, rows, vocab, temperature=greedy, num_logprobs=20, with_logprobs=True), ops.upload
    )
    seconds = seconds_of(ops, [lambda: ops.sample(logits, options)])
    report_bandwidth(f"greedy sample_tokens + top_logprobs [{rows}, 151936], K = 20", 2 * logits.nbytes, seconds)

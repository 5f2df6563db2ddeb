"""sample_tokens against NumpyOps.sample: the same token ids for any parameters and logits."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import report_bandwidth, seconds_of
from tests.support.sampling_cases import random_bias, random_options, random_penalties, uploaded

pytestmark = pytest.mark.gpu

VOCABS = (1, 5, 1000, 4096, 32003, 151936)
"""Odd ones leave rows without alignment."""


def check(ops, logits, options) -> None:
    expected = NumpyOps().sample(logits, options)
    with ops.scratch():
        sampled = ops.sample(ops.upload(logits), uploaded(options, ops.upload))
        token_ids, is_nan = ops.download(sampled.token_ids), ops.download(sampled.is_nan)
    np.testing.assert_array_equal(is_nan, expected.is_nan)
    different = np.flatnonzero(token_ids != expected.token_ids)
    received = [
        (row, token_ids[row], expected.token_ids[row], options.temperature[row], options.top_k[row], options.top_p[row],
         options.min_p[row]) for row in different[:5]
    ]  # fmt: skip
    assert not different.size, (
        f"{different.size} of {len(token_ids)} rows differ (row, got, expected, options): {received}"
    )


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.01, 1, 4])
def test_random_options(open_ops, rng, vocab, spread):
    rows = 400 if vocab < 10000 else 64
    logits = (rng.standard_normal((rows, vocab)) * spread + rng.uniform(-30, 30, (rows, 1))).astype(np.float32)
    check(open_ops("float32"), logits, random_options(rng, rows, vocab))


@pytest.mark.parametrize("vocab", VOCABS)
def test_ties_at_the_threshold_stay(open_ops, rng, vocab):
    rows = 200 if vocab < 10000 else 32
    logits = (np.round(rng.standard_normal((rows, vocab)) * 12) / 4).astype(np.float32)
    logits[0] = 1.5
    logits[1, ::2] = -0.0
    logits[1, 1::2] = 0.0
    check(open_ops("float32"), logits, random_options(rng, rows, vocab))


@pytest.mark.parametrize("vocab", [5, 32003])
def test_each_filter_alone(open_ops, rng, vocab):
    rows = 100
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    off = {
        "temperature": np.full(rows, 0.8, np.float32),
        "top_k": np.full(rows, vocab, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
    }
    check(open_ops("float32"), logits, random_options(rng, rows, vocab, **off))
    for name in ("temperature", "top_k", "top_p", "min_p"):
        column = getattr(random_options(rng, rows, vocab), name)
        check(open_ops("float32"), logits, random_options(rng, rows, vocab, **{**off, name: column}))


@pytest.mark.parametrize("vocab", [40, 32003])
def test_nan_and_rows_without_a_finite_logit_are_reported(open_ops, rng, vocab):
    rows = 12
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[0, -1] = np.nan
    logits[1, 0] = -np.nan
    logits[2] = np.nan
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    logits[5, : vocab // 2] = -np.inf
    for temperature in (0.0, 1.0):
        options = random_options(rng, rows, vocab, temperature=np.full(rows, temperature, np.float32))
        check(open_ops("float32"), logits, options)


@pytest.mark.parametrize("vocab", [1000, 151936])
def test_bias_and_penalties_come_first(open_ops, rng, vocab):
    rows = 40
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    bias, penalties = random_bias(rng, rows, vocab), random_penalties(rng, rows, vocab)
    for given in ({"bias": bias}, {"penalties": penalties}, {"bias": bias, "penalties": penalties}):
        check(open_ops("float32"), logits, random_options(rng, rows, vocab, **given))


def test_logits_are_left_as_they_were(open_ops, rng):
    ops, rows, vocab = open_ops("float32"), 4, 1000
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    given = ops.upload(logits)
    with ops.scratch():
        ops.sample(given, uploaded(random_options(rng, rows, vocab, bias=random_bias(rng, rows, vocab)), ops.upload))
    np.testing.assert_array_equal(ops.download(given), logits)


def test_no_rows(open_ops, rng):
    ops = open_ops("float32")
    sampled = ops.sample(ops.empty((0, 100), np.float32), uploaded(random_options(rng, 0, 100), ops.upload))
    assert sampled.token_ids.shape == (0,)


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize(
    ("what", "temperature", "top_k", "top_p"),
    [("greedy", 0, 2**31 - 1, 1), ("plain", 1, 2**31 - 1, 1), ("top-p", 0.7, 2**31 - 1, 0.9), ("both", 0.7, 20, 0.8)],
)
def test_speed(open_ops, rng, rows, what, temperature, top_k, top_p):
    ops, vocab = open_ops("float32"), 151936
    logits = ops.upload(rng.standard_normal((rows, vocab), np.float32) * np.float32(2.5))
    fixed = {
        "temperature": np.full(rows, temperature, np.float32),
        "top_k": np.full(rows, top_k, np.int32),
        "top_p": np.full(rows, top_p, np.float32),
        "min_p": np.zeros(rows, np.float32),
    }
    options = uploaded(random_options(rng, rows, vocab, **fixed), ops.upload)
    seconds = seconds_of(ops, [lambda: ops.sample(logits, options)])
    report_bandwidth(f"sample_tokens [{rows}, 151936] {what}, once through the row", logits.nbytes, seconds)

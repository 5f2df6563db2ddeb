"""Sampling as the contract defines it: what each control leaves over, and that draws follow the exact probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.philox import gumbel_noise
from model.ops.cpu.sampling import highest
from model.ops.interface import Bias, Penalties, Sampled, SamplingArrays, TokenMask

OPS = NumpyOps()


def how(num_rows: int, **changes: Any) -> SamplingArrays:
    """Plain sampling at temperature 1, row r at position r; a scalar in `changes` holds for all rows."""
    columns: dict[str, tuple[Any, type]] = {
        "temperature": (1.0, np.float32),
        "top_k": (1 << 30, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seed": (1234, np.uint64),
        "position": (np.arange(num_rows), np.uint32),
        "branch": (0, np.uint32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(changes.pop(name, default), dtype), (num_rows,)).copy()
        for name, (default, dtype) in columns.items()
    }
    rest = {"penalties": None, "bias": None, "num_logprobs": 0, "with_logprobs": False, **changes}
    return SamplingArrays(**arrays, **rest)


def sample(logits: np.ndarray, **changes: Any) -> Sampled:
    before = logits.copy()
    sampled = OPS.sample(logits, how(len(logits), **changes))
    np.testing.assert_array_equal(logits, before)
    assert sampled.token_ids.dtype == np.int32
    return sampled


def draws(logits: list[float], num_draws: int = 4000, **changes: Any) -> np.ndarray:
    """Return how often each token is drawn, int[V]."""
    rows = np.tile(np.array(logits, np.float32), (num_draws, 1))
    return np.bincount(sample(rows, **changes).token_ids, minlength=len(logits))


def assert_follows(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square within five standard deviations of its mean; what cannot be drawn never is."""
    probabilities = probabilities / probabilities.sum()
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible] * counts.sum()
    freedom = max(np.count_nonzero(possible) - 1, 1)
    assert np.sum((counts[possible] - expected) ** 2 / expected) < freedom + 5 * np.sqrt(2 * freedom)


LOGITS = [1.5, -0.5, 0.25, 2.0, 0.0, -2.0, 1.0, 0.5, 1.75, -1.0, 0.75]
WEIGHTS = np.exp(np.array(LOGITS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float):
    assert_follows(draws(LOGITS, temperature=temperature), np.exp(np.array(LOGITS) / temperature))


def best(num: int) -> np.ndarray:
    return np.where(np.sort(WEIGHTS)[-num] <= WEIGHTS, WEIGHTS, 0)


def test_top_k():
    assert_follows(draws(LOGITS, top_k=3), best(3))
    assert draws(LOGITS, top_k=1)[3] == 4000


def test_top_p_takes_the_fewest_that_reach_it():
    shares = np.sort(WEIGHTS)[::-1].cumsum() / WEIGHTS.sum()
    for num in (1, 2, 5):
        assert_follows(draws(LOGITS, top_p=shares[num - 1] - 0.01), best(num))


def test_top_p_is_of_what_top_k_left():
    kept = np.sort(WEIGHTS)[-4:][::-1]
    share_of_two = kept[:2].sum() / kept.sum()
    assert_follows(draws(LOGITS, top_k=4, top_p=share_of_two - 0.01), best(2))


def test_min_p_is_relative_to_the_best():
    assert_follows(draws(LOGITS, min_p=0.3), np.where(0.3 * WEIGHTS.max() <= WEIGHTS, WEIGHTS, 0))
    assert draws(LOGITS, min_p=1.0)[3] == 4000
    # top-p and min-p together: the stricter of the two
    assert_follows(draws(LOGITS, top_p=0.99, min_p=0.3), np.where(0.3 * WEIGHTS.max() <= WEIGHTS, WEIGHTS, 0))


def test_ties_with_the_threshold_stay():
    logits = [1.0, 3.0, 1.0, 1.0, -5.0]
    for changes in ({"top_k": 2}, {"top_p": 0.8}, {"min_p": np.exp(-2.0) - 1e-6}):
        assert_follows(draws(logits, **changes), np.exp([1.0, 3.0, 1.0, 1.0, -np.inf]))


def test_greedy_takes_the_lower_of_equals():
    logits = np.array([[0, 5, 5, 1], [-np.inf, -np.inf, -3, -np.inf]], np.float32)
    assert sample(logits, temperature=0).token_ids.tolist() == [1, 2]


def test_rows_of_every_kind_share_a_step():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 97)).astype(np.float32)
    columns = {
        "temperature": [0, 0.7, 1, 0.3, 1.5, 0],
        "top_k": [5, 200, 3, 1, 97, 1],
        "top_p": [0.1, 1, 0.9, 1, 0.5, 1],
        "min_p": [0, 0, 0.05, 0.2, 0, 1],
        "seed": [1, 2**64 - 1, 3, 1 << 40, 5, 6],
        "branch": [0, 1, 2, 3, 4, 5],
    }
    together = sample(logits, **columns).token_ids.tolist()
    alone = [
        sample(logits[r : r + 1], position=r, **{name: column[r] for name, column in columns.items()}).token_ids[0]
        for r in range(6)
    ]
    assert together == alone


def test_seed_position_and_branch_each_change_the_noise():
    logits = np.zeros((2000, 50), np.float32)
    base = sample(logits).token_ids
    np.testing.assert_array_equal(sample(logits).token_ids, base)
    for changes in ({"seed": 1235}, {"seed": 1234 | 1 << 50}, {"branch": 1}, {"position": np.arange(2000) + 2000}):
        same = np.mean(sample(logits, **changes).token_ids == base)
        assert same == pytest.approx(1 / 50, abs=0.015)


def test_bias_forces_and_forbids():
    bias = Bias(
        indptr=np.array([0, 2, 2, 5], np.int32),
        token_ids=np.array([4, 3, 99, -1, 0], np.int32),
        values=np.array([1.5, -np.inf, 1000, 1000, 100], np.float32),
    )
    logits = np.tile(np.array(LOGITS, np.float32), (3, 1))
    # Row 0 loses its best to row 8's token; row 2's ids 99 and -1 are no tokens
    assert sample(logits, temperature=0, bias=bias).token_ids.tolist() == [8, 3, 0]


def test_a_mask_leaves_what_it_allows():
    logits = np.tile(np.array(LOGITS, np.float32), (5, 1))
    bias = Bias(np.array([0, 1, 1, 1, 1, 1], np.int32), np.array([3], np.int32), np.array([100], np.float32))
    words = np.array([[0b110], [0], [1 << 31 | 0b1 << 10]], np.uint32)
    mask = TokenMask(np.array([0, 2, -1, 3, 1], np.int32), words)
    sampled = sample(logits, temperature=0, bias=bias, mask=mask, num_logprobs=1, with_logprobs=True)
    assert sampled.token_ids.tolist() == [2, 10, 3, 3, 0]
    assert sampled.is_nan.tolist() == [False, False, False, False, True]
    assert sampled.top_ids.ravel().tolist() == [3] * 5  # of the raw logits
    allowed = np.zeros(11)
    allowed[[1, 2]] = WEIGHTS[[1, 2]]
    many = TokenMask(np.zeros(4000, np.int32), words)
    assert_follows(draws(LOGITS, mask=many, top_k=9), allowed)


def test_tokens_beyond_the_words_of_a_mask_are_forbidden():
    logits = np.arange(70, dtype=np.float32)[None]
    mask = TokenMask(np.zeros(1, np.int32), np.full((1, 2), 0xFFFFFFFF, np.uint32))
    assert sample(logits, temperature=0, mask=mask).token_ids.tolist() == [63]


def test_penalties_by_hand():
    seen = Penalties(
        repetition=np.array([2.0, 1.0], np.float32),
        presence=np.array([0.0, 0.5], np.float32),
        frequency=np.array([0.0, 0.25], np.float32),
        indptr=np.array([0, 3, 6], np.int32),
        token_ids=np.array([0, 1, 11, 0, 1, 2], np.int32),
        output_counts=np.array([1, 0, 5, 3, 1, 0], np.int32),
    )
    logits = np.log(np.array([[0.3, 0.1, 0.4, 0.2]] * 2, np.float32)) + 2
    logits = np.tile(logits, (3000, 1))
    repeated = Penalties(
        repetition=np.tile(seen.repetition, 3000),
        presence=np.tile(seen.presence, 3000),
        frequency=np.tile(seen.frequency, 3000),
        indptr=np.arange(6001, dtype=np.int32) * 3,
        token_ids=np.tile(seen.token_ids, 3000),
        output_counts=np.tile(seen.output_counts, 3000),
    )
    token_ids = sample(logits, penalties=repeated).token_ids
    first, second = logits[0].astype(np.float64), logits[1].astype(np.float64)
    first[0] /= 2  # positive
    first[1] *= 2  # negative; the prompt's token counts for repetition
    second[0] -= 0.5 + 3 * 0.25
    second[1] -= 0.5 + 0.25  # token 2 was only in the prompt
    assert logits[0, 0] > 0 > logits[0, 1]
    assert_follows(np.bincount(token_ids[::2], minlength=4), np.exp(first))
    assert_follows(np.bincount(token_ids[1::2], minlength=4), np.exp(second))


def test_logprobs_are_of_the_raw_logits():
    logits = np.tile(np.array(LOGITS, np.float32), (2, 1))
    bias = Bias(np.array([0, 1, 1], np.int32), np.array([5], np.int32), np.array([100], np.float32))
    sampled = sample(logits, temperature=0, bias=bias, num_logprobs=4, with_logprobs=True)
    exact = np.array(LOGITS) - np.log(WEIGHTS.sum())
    assert sampled.token_ids.tolist() == [5, 3]
    np.testing.assert_allclose(sampled.logprobs, exact[[5, 3]], rtol=1e-5)
    assert sampled.top_ids.tolist() == [[3, 8, 0, 6]] * 2
    np.testing.assert_allclose(sampled.top_logprobs, exact[sampled.top_ids], rtol=1e-5)


def test_logprobs_break_ties_by_lower_id_and_may_be_none_but_the_chosen():
    logits = np.array([[1, 2, 2, 2, -np.inf]], np.float32)
    sampled = sample(logits, num_logprobs=2, with_logprobs=True, temperature=0)
    assert sampled.top_ids.tolist() == [[1, 2]]
    chosen_only = sample(logits, num_logprobs=0, with_logprobs=True, temperature=0)
    assert chosen_only.top_ids.shape == (1, 0)
    np.testing.assert_array_equal(chosen_only.logprobs, sampled.logprobs)
    assert sample(logits).logprobs is None


def test_rows_without_a_number_are_flagged_and_leave_the_others_alone():
    logits = np.tile(np.array(LOGITS, np.float32), (4, 1))
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    sampled = sample(logits, temperature=[1, 0, 0, 0.5], with_logprobs=True, num_logprobs=2)
    assert sampled.is_nan.tolist() == [True, True, False, False]
    assert sampled.token_ids.tolist()[:3] == [0, 0, 3]


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 1e-45])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_a_tiny_temperature_is_greedy_not_nan(temperature, options):
    """Even where logits divided by it are more than a number can be."""
    logits = np.array([[1, 2, 4, 3], [-1, -2, -0.5, -4], [-2, -1, 0, -3]] * 4, np.float32)
    sampled = sample(logits, temperature=temperature, **options)
    assert sampled.token_ids.tolist() == [2] * 12
    assert not sampled.is_nan.any()


@pytest.mark.parametrize("scale", [0.1, 3.0, 300.0, 3e6])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_tokens_left_without_noise_are_never_drawn(scale, temperature):
    logits = (np.random.default_rng(int(scale)).normal(size=(40, 300)) * scale).astype(np.float32)
    params = how(40, temperature=temperature)
    rows, token_ids = np.indices(logits.shape).reshape(2, -1)
    noise = gumbel_noise(token_ids, params.seed[rows], params.position[rows], params.branch[rows])
    wanted = (logits / np.float32(temperature) + noise.reshape(logits.shape)).argmax(axis=1)
    assert sample(logits, temperature=temperature).token_ids.tolist() == wanted.tolist()


@pytest.mark.parametrize("num_best", [0, 1, 3, 6, 9])
def test_the_highest_match_a_stable_sort(num_best):
    rows = [[1, 2, 2, 0, 2, 1], [0] * 6, [np.nan, 3, 1, np.nan, 3, 2], [np.nan] * 6, [-np.inf, 1, *[-np.inf] * 4]]
    for logprobs in map(np.float32, rows):
        wanted = np.argsort(-logprobs, kind="stable")[:num_best]
        assert highest(logprobs, num_best).tolist() == wanted.tolist()

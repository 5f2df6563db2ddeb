import random
from itertools import islice

import numpy as np
import pytest

from service.engine.drafting.drafter import EAGLE3, NGRAM
from service.engine.drafting.lengths import MAX_CHARGE, PLAIN_STEPS, TRIAL_SHARE, Acceptance, Drafting, DraftLengths
from service.engine.drafting.step_cost import StepCost
from service.engine.scheduling.speculation import HOPE

FLAT = StepCost([1, 1000], [1.0, 1.001])
STEEP = StepCost([1, 1000], [0.001, 1.0])


class Names:
    """Substitute of a sequence: hashable and weakly referable."""


def choose(lengths, sequences, most, token_s=0.0):
    gains = Acceptance().gains(NGRAM, sequences, [most] * len(sequences))
    return lengths.choose(gains, len(sequences), Drafting(token_s))


def test_rows_that_cost_nothing_are_all_drafted():
    assert choose(DraftLengths(FLAT), [Names(), Names()], 5) == [5, 5]
    assert choose(DraftLengths(), [Names()], 7) == [7]


def test_rows_that_cost_as_much_as_a_step_are_not():
    assert choose(DraftLengths(STEEP), [Names() for _ in range(50)], 5) == [0] * 50
    assert not DraftLengths(STEEP).may_pay(0.9, 50)
    assert DraftLengths(FLAT).may_pay(0.9, 20)
    assert DraftLengths().may_pay(0.0, 1)


def test_slow_drafting_is_left_out():
    one = Names()
    assert choose(DraftLengths(FLAT), [one], 5, token_s=2.0) == [0]
    assert 0 < choose(DraftLengths(FLAT), [one], 16, token_s=0.2)[0] < 16


def test_each_sequence_gets_drafts_of_one_more_round_of_a_drafter():
    gains = [[0.9, 0.81, 0.5], [0.6, 0.36, 0.1]]
    assert DraftLengths(FLAT).choose(gains, 2, Drafting(token_s=0.25)) == [2, 2]


def test_the_step_has_room_for_some_drafts():
    assert DraftLengths(FLAT).choose([[0.9, 0.8], [0.7]], 2, Drafting(max_drafts=2)) == [2, 0]
    assert DraftLengths(FLAT).choose([[0.9, 0.8], [0.7]], 2, Drafting(max_drafts=0)) == [0, 0]


def test_a_sequence_whose_drafts_fail_gets_fewer_and_tries_again():
    lengths, seen, good, bad = DraftLengths(StepCost([1, 101], [1.0, 21.0])), Acceptance(), Names(), Names()
    for _ in range(20):
        seen.on_result(NGRAM, good, 4, 4)
        seen.on_result(NGRAM, bad, 0, 4)
        chosen = lengths.choose(seen.gains(NGRAM, [good, bad], [4, 4]), 2)
    assert chosen == [4, 0]
    for _ in range(200):
        chosen = lengths.choose(seen.gains(NGRAM, [good, bad], [4, 4]), 2)
    assert chosen[1] > 0


def test_no_sequence_gets_more_than_its_drafts():
    assert DraftLengths(FLAT).choose([[], [0.9, 0.8, 0.7], [0.5]], 3) == [0, 3, 1]
    assert DraftLengths(FLAT).choose([], 2) == []
    gains = Acceptance().gains(NGRAM, [Names(), Names()], [0, 2])
    np.testing.assert_allclose(gains, [[0, 0], [0.7, 0.49]])


def test_a_gain_within_the_error_of_step_times_is_left():
    assert DraftLengths(FLAT).choose([[0.02]], 1) == [0]
    assert DraftLengths(FLAT).choose([[0.05]], 1) == [1]


def test_after_steps_without_drafts_a_trial_changes_the_rate():
    seen = Acceptance()
    for _ in range(100):
        seen.on_step(NGRAM, 8)
        seen.on_result(NGRAM, Names(), 0, 8)
    assert seen.rate(NGRAM) < 0.05
    for _ in range(500):
        seen.on_step(NGRAM, 0)
    assert seen.rate(NGRAM) < 0.2
    seen.on_result(NGRAM, Names(), 16, 16)
    assert seen.rate(NGRAM) > 0.5


def test_an_ended_sequence_is_forgotten():
    seen = Acceptance()
    seen.on_result(NGRAM, Names(), 1, 2)
    assert not seen._sequences


def test_drafts_that_pay_are_left_out_for_a_trial():
    lengths, counts = DraftLengths(StepCost([1, 9], [1.0, 1.0])), []
    for _ in range(2000):
        chosen = lengths.choose([[0.5]], 1)
        lengths.on_planned(sum(chosen))
        lengths.on_step(1, sum(chosen), 1.0)
        counts.append(sum(chosen))
        assert not lengths.is_idle
    assert 3 * PLAIN_STEPS <= counts.count(0) < 0.02 * len(counts)


def test_steps_without_drafts_need_no_trial_while_there_are_none():
    lengths = DraftLengths(StepCost([1, 9], [1.0, 1.0]))
    for _ in range(2000):
        lengths.on_step(1, 0, 1.0)
    assert lengths.choose([[0.5]], 1) == [1]
    lengths.on_planned(1)
    lengths.on_step(1, 1, 1.0)
    for _ in range(2000):
        lengths.on_step(1, 1, 1.0)
    assert lengths.choose([[0.5]], 1) == [0]


def test_a_change_to_drafts_may_cost_more_than_one_step_of_them_gains():
    cost = StepCost([1, 9], [1.0, 1.0])
    for _ in range(100):
        cost.on_step(4, 4, 1.2)
        cost.on_step(4, 8, 1.2)
    lengths = DraftLengths(cost)
    assert cost.drafted_s(4, 4)[-1] + cost.excess_s(4) > 1.35
    assert lengths.choose([[0.35]] * 4, 4) == [1] * 4


def test_a_trial_waits_until_something_is_drafted():
    lengths = DraftLengths(StepCost([1, 9], [1.0, 1.0]))
    for _ in range(4):
        lengths.on_step(1, 1, 3.0)
    assert lengths.choose([[0.5]], 1) == [0]
    assert lengths.is_idle
    for _ in range(600):
        lengths.on_step(1, 0, 1.0)
    for _ in range(2):
        assert lengths.choose([[0.5]], 1) == [1]  # the drafter has none yet
    lengths.on_planned(1)
    assert lengths.choose([[0.5]], 1) == [0]


def test_a_trial_pays_for_the_steps_around_it():
    waits = []
    for excess_s in (0.0, 0.1):
        cost = StepCost([1, 101], [1.0, 1.0])
        cost.on_step(1, 0, 1.0)
        for _ in range(100):
            cost.on_step(1, 1, 1.0 + excess_s)
            cost.on_step(1, 1 + 2, 1.0 + excess_s)
        lengths, waited = DraftLengths(cost), 0
        while not any(lengths.choose([[0.01]], 1, Drafting(hope=HOPE))):
            lengths.on_step(1, 0, 1.0)
            waited += 1
        waits.append(waited)
    assert waits[1] > waits[0] + 3 * 0.1 / TRIAL_SHARE * 0.5


LATEST_TRIAL = int(2 * MAX_CHARGE / TRIAL_SHARE)
"""Steps after the last one."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 160, 192, 256, 512)
FORWARD_MS = (3.95, 4.15, 4.5, 5.0, 5.3, 5.5, 4.9, 4.9, 5.6, 6.3, 6.9, 7.5, 9.3, 16.0)
"""About those of an H200."""


class SimulatedDevice:
    """Steps without drafts overlap; others expose 0.5 ms of the host and 10 us a row. A row's attention takes 2 us."""

    def __init__(self, batch, rate, token_ms, seed, noise=0.01):
        self._batch, self.rate, self._token_ms, self._noise = batch, rate, token_ms, noise
        self._random, self._was_plain = random.Random(seed), False

    def step_ms(self, counts) -> tuple[float, float]:
        """Return the step's, and those of drafting."""
        num_rows = self._batch + sum(counts)
        noise = self._random.lognormvariate(0, self._noise) * (4 if self._random.random() < 0.003 else 1)
        device_ms = (float(np.interp(num_rows, ROWS, FORWARD_MS)) + 0.1 + 0.002 * num_rows) * noise
        is_exposed, self._was_plain = any(counts) or not self._was_plain, not any(counts)
        return device_ms + is_exposed * (0.5 + 0.01 * num_rows), max(counts) * self._token_ms

    def num_accepted(self, count):
        return next((number for number in range(count) if self._random.random() > self.rate), count)


def simulated_steps(device, batch, token_ms, *, num_drafts=None):
    """Yield each step's milliseconds, tokens and drafts; `num_drafts`: of every sequence, not chosen."""
    lengths, seen = DraftLengths(StepCost(ROWS, [1e-3 * each for each in FORWARD_MS])), Acceptance()
    sequences, was_plain = [Names() for _ in range(batch)], False
    while True:
        if num_drafts is None:
            gains = seen.gains(EAGLE3, sequences, [8] * batch)
            counts = lengths.choose(gains, batch, Drafting(1e-3 * token_ms, 256 - batch, HOPE))
        else:
            counts = [num_drafts] * batch
        step_ms, drafting_ms = device.step_ms(counts)
        lengths.on_planned(sum(counts), 1e-3 * drafting_ms)
        accepted = [device.num_accepted(count) for count in counts]
        seen.on_step(EAGLE3, sum(counts))
        for sequence, count, num_accepted in zip(sequences, counts, accepted, strict=True):
            if count:
                seen.on_result(EAGLE3, sequence, num_accepted, count)
        lengths.on_accepted(sum(accepted))
        if any(counts) or was_plain:
            lengths.on_step(batch, sum(counts), 1e-3 * step_ms)
        was_plain = not any(counts)
        yield step_ms + drafting_ms, batch + sum(accepted), sum(counts)


def rate_of(steps, num_steps):
    """Return tokens per ms."""
    times, tokens, _ = zip(*islice(steps, num_steps), strict=True)
    return sum(tokens) / sum(times)


def simulated_rate(batch, rate, token_ms=0.0, *, num_drafts=None, num_steps=600, seed=0):
    device = SimulatedDevice(batch, rate, token_ms, seed)
    return rate_of(simulated_steps(device, batch, token_ms, num_drafts=num_drafts), num_steps)


@pytest.mark.parametrize("batch", [1, 4, 16, 64, 128])
@pytest.mark.parametrize(("rate", "token_ms"), [(0.0, 0.0), (0.3, 1.2), (0.6, 0.0), (0.8, 0.0), (0.8, 0.4)])
def test_no_batch_is_slower_than_without_drafts_and_gains_are_near_the_best(batch, rate, token_ms):
    plain = simulated_rate(batch, rate, num_drafts=0)
    counts = [count for count in (1, 2, 3, 4, 6, 8) if batch * (1 + count) <= 256]
    best = max(simulated_rate(batch, rate, token_ms, num_drafts=count, num_steps=150) for count in counts)
    chosen = simulated_rate(batch, rate, token_ms)
    assert chosen > 0.98 * plain
    assert chosen > 0.93 * best


@pytest.mark.parametrize(("batch", "token_ms", "noise"), [(1, 0.1, 0.01), (4, 1.5, 0.3), (16, 0.4, 0.3)])
def test_a_drafter_that_lied_is_used_again_once_it_is_right(batch, token_ms, noise):
    device = SimulatedDevice(batch, 0.0, token_ms, 1, noise)
    plain = rate_of(simulated_steps(SimulatedDevice(batch, 0.0, 0.0, 1, noise), batch, 0.0, num_drafts=0), 600)
    steps = simulated_steps(device, batch, token_ms)
    assert rate_of(islice(steps, 100, None), 600) > 0.98 * plain
    device.rate = 1.0
    counts = [num_drafts for _, _, num_drafts in islice(steps, LATEST_TRIAL + 50)]
    assert sum(map(bool, counts[-40:])) >= 30


def test_the_next_trial_of_drafts_comes_in_time_whatever_the_last_one_took():
    lengths = DraftLengths(StepCost([1, 9], [1.0, 1.5]))
    for _ in range(3):
        lengths.on_step(1, 0, 1.0)
    for _ in range(2):
        waited = 0
        while not sum(counts := lengths.choose([[0.01]], 1, Drafting(0.1, hope=HOPE))):
            lengths.on_planned(0)
            lengths.on_step(1, 0, 1.0)
            waited += 1
        assert 10 < waited <= LATEST_TRIAL
        lengths.on_planned(sum(counts), 100.0)
        lengths.on_step(1, sum(counts), 2.0)
        lengths.on_accepted(0)

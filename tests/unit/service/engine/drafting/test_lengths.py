import numpy as np

from service.engine.drafting.drafter import NGRAM
from service.engine.drafting.lengths import Acceptance, DraftLengths, StepCost

FLAT = StepCost([1, 1000], [1.0, 1.001])
STEEP = StepCost([1, 1000], [0.001, 1.0])


class Names:
    """Stands for a sequence: hashable, and weakly referable."""


def choose(lengths, sequences, most, token_s=0.0):
    gains = Acceptance().gains(NGRAM, sequences, [most] * len(sequences))
    return lengths.choose(gains, len(sequences), token_s)


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


def test_the_lost_overlap_is_a_price():
    lengths = DraftLengths(FLAT)
    assert choose(lengths, [Names()], 1) == [1]
    lengths.lost_overlap_s = 1.0
    assert choose(lengths, [Names()], 1) == [0]
    assert choose(lengths, [Names()], 8)[0] > 3
    assert not lengths.may_pay(0.9, 1)


def test_a_sequence_whose_drafts_fail_gets_fewer_and_tries_again():
    lengths, seen, good, bad = DraftLengths(StepCost([1, 101], [1.0, 21.0])), Acceptance(), Names(), Names()
    for _ in range(20):
        seen.on_result(NGRAM, good, 4, 4)
        seen.on_result(NGRAM, bad, 0, 4)
        chosen = lengths.choose(seen.gains(NGRAM, [good, bad], [4, 4]), 2)
    assert chosen == [4, 0]
    for _ in range(2000):
        chosen = lengths.choose(seen.gains(NGRAM, [good, bad], [4, 4]), 2)
    assert chosen[1] > 0


def test_no_sequence_gets_more_than_its_drafts():
    assert DraftLengths(FLAT).choose([[], [0.9, 0.8, 0.7], [0.5]], 3) == [0, 3, 1]
    assert DraftLengths(FLAT).choose([], 2) == []


def test_a_gain_within_the_error_of_step_times_is_left():
    assert DraftLengths(FLAT).choose([[0.02]], 1) == [0]
    assert DraftLengths(FLAT).choose([[0.05]], 1) == [1]


def test_the_hosts_part_is_seen():
    cost = StepCost([1, 10], [0.1, 0.2])
    for _ in range(200):
        cost.on_step(1, 0, 0.6)
    assert abs(cost.plain_s(1) - 0.6) < 1e-3
    assert abs(cost.plain_s(10) - 0.7) < 1e-3
    assert cost.plain_s(20) > cost.plain_s(10)


def test_what_drafts_add_is_seen():
    cost = StepCost([1, 11], [1.0, 2.0])
    np.testing.assert_allclose([cost.drafted_s(1, count) for count in (0, 5, 10)], [1.0, 1.5, 2.0])
    for _ in range(300):
        cost.on_step(1, 5, 3.0)
    np.testing.assert_allclose([cost.drafted_s(1, count) for count in (0, 5, 10)], [1.0, 3.0, 5.0], rtol=0.01)


def test_a_step_that_waited_for_the_processor_counts_little():
    cost = StepCost([1, 10], [1.0, 1.1])
    cost.on_step(1, 0, 1.0)
    cost.on_step(1, 0, 500.0)
    assert cost.plain_s(1) < 1.2
    cost.on_step(1, 9, 500.0)
    assert cost.drafted_s(1, 9) < 1.5


def test_an_ended_sequence_is_forgotten():
    seen = Acceptance()
    seen.on_result(NGRAM, Names(), 1, 2)
    assert not seen._sequences

import numpy as np

from service.engine.drafting.drafter import NGRAM
from service.engine.drafting.lengths import DraftLengths, StepCost

FLAT = StepCost([1, 1000], [1.0, 1.001])
STEEP = StepCost([1, 1000], [0.001, 1.0])


class Names:
    """Stands for a sequence: hashable, and weakly referable."""


def choose(lengths, sequences, most, token_s=0.0):
    return lengths.choose(NGRAM, sequences, [most] * len(sequences), len(sequences), token_s)


def test_rows_that_cost_nothing_are_all_drafted():
    assert choose(DraftLengths(FLAT), [Names(), Names()], 5) == [5, 5]
    assert choose(DraftLengths(), [Names()], 7) == [7]


def test_rows_that_cost_as_much_as_a_step_are_not():
    assert choose(DraftLengths(STEEP), [Names() for _ in range(50)], 5) == [0] * 50


def test_slow_drafting_is_left_out():
    one = Names()
    assert choose(DraftLengths(FLAT), [one], 5, token_s=2.0) == [0]
    assert 0 < choose(DraftLengths(FLAT), [one], 16, token_s=0.2)[0] < 16


def test_a_sequence_whose_drafts_fail_gets_fewer_and_tries_again():
    cost = StepCost([1, 101], [1.0, 21.0])
    lengths, good, bad = DraftLengths(cost), Names(), Names()
    for _ in range(20):
        lengths.on_result(NGRAM, good, 4, 4)
        lengths.on_result(NGRAM, bad, 0, 4)
        chosen = choose(lengths, [good, bad], 4)
    assert chosen == [4, 0]
    for _ in range(2000):
        chosen = choose(lengths, [good, bad], 4)
    assert chosen[1] > 0


def test_no_sequence_gets_more_than_its_drafts():
    assert DraftLengths(FLAT).choose(NGRAM, [Names(), Names(), Names()], [0, 3, 1], 3, 0.0) == [0, 3, 1]
    assert DraftLengths(FLAT).choose(NGRAM, [], [], 2, 0.0) == []


def test_the_hosts_part_is_seen():
    cost = StepCost([1, 10], [0.1, 0.2])
    for _ in range(200):
        cost.on_step(1, 0.6)
    assert abs(cost.of(np.array([1.0]))[0] - 0.6) < 1e-3
    assert cost.of(np.array([20.0]))[0] > cost.of(np.array([10.0]))[0]


def test_an_ended_sequence_is_forgotten():
    lengths = DraftLengths(FLAT)
    lengths.on_result(NGRAM, Names(), 1, 2)
    assert not lengths._sequences

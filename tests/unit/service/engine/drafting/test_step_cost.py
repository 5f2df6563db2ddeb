import pytest

from service.engine.drafting.step_cost import HALF_LIFE_S, MAX_EXCESS, DraftTime, StepCost


def drafted_s(cost, num_rows, *counts):
    seconds = cost.drafted_s(num_rows, max(counts)).tolist()
    return [seconds[count - 1] for count in counts]


def test_rows_beyond_the_largest_size_cost_its_mean():
    cost = StepCost([1, 10], [1.0, 2.0])
    assert drafted_s(cost, 5, 5, 15) == [2.0, 4.0]


def test_a_larger_size_may_be_quicker():
    assert drafted_s(StepCost([1, 2, 3], [1.0, 5.0, 2.0]), 1, 1, 2) == [5.0, 2.0]


def test_overlapped_steps_without_drafts_are_seen():
    cost = StepCost([1, 10], [0.1, 0.2])
    for _ in range(200):
        cost.on_step(1, 0, 0.6)
    assert cost.plain_s(1) == pytest.approx(0.6)
    assert cost.plain_s(10) == pytest.approx(0.7)
    assert cost.plain_s(20) > cost.plain_s(10)


def test_what_drafts_add_is_seen_and_is_in_proportion_to_rows_at_first():
    cost = StepCost([1, 101], [1.0, 1.0])
    for _ in range(100):
        cost.on_step(1, 19, 1.4)
    assert drafted_s(cost, 1, 19, 9) == pytest.approx([1.4, 1.2], rel=0.01)
    assert cost.hoped_s(1, 19) == 1.0
    assert cost.drafted_s(1, 19, with_excess=False).tolist() == [1.0] * 19
    for _ in range(30):
        cost.on_step(1, 9, 1.3)
        cost.on_step(1, 19, 1.4)
    assert drafted_s(cost, 1, 9, 14, 19) == pytest.approx([1.3, 1.35, 1.4], rel=0.01)
    assert cost.excess_s(20) == pytest.approx(0.4, rel=0.01)


def test_the_first_steps_count_at_once():
    cost = StepCost([1, 10], [1.0, 1.0])
    cost.on_step(2, 0, 1.5)
    cost.on_step(2, 4, 2.5)
    assert cost.plain_s(2) == 1.5
    assert drafted_s(cost, 2, 4) == pytest.approx([2.5], rel=0.1)


def test_drafts_before_the_first_plain_step_are_counted_from_it():
    cost = StepCost([1, 10], [1.0, 1.0])
    cost.on_step(2, 4, 1.9)
    cost.on_step(2, 0, 1.3)
    assert drafted_s(cost, 2, 4) == pytest.approx([1.9], rel=0.05)
    cost.on_step(2, 0, 1.1)
    assert drafted_s(cost, 2, 4) == pytest.approx([1.8], rel=0.05)


def test_a_slow_first_step_with_drafts_is_soon_forgotten():
    cost = StepCost([1, 101], [1.0, 1.0])
    cost.on_step(1, 0, 1.0)
    cost.on_step(1, 19, 5.0)
    assert drafted_s(cost, 1, 19)[0] > 1.8
    for _ in range(2):
        cost.on_step(1, 19, 1.2)
    assert drafted_s(cost, 1, 19) == pytest.approx([1.2], abs=0.1)


def test_a_step_that_waited_for_the_processor_counts_little():
    cost = StepCost([1, 10], [1.0, 1.1])
    cost.on_step(1, 0, 1.0)
    cost.on_step(1, 0, 500.0)
    assert cost.plain_s(1) <= 1.5
    cost.on_step(1, 9, 500.0)
    assert drafted_s(cost, 1, 9)[0] <= 2 * (cost.plain_s(1) + 0.1)


@pytest.mark.parametrize(("num_plain", "expected_s"), [(0, 1.396), (300, 1.31)])
def test_after_steps_without_drafts_one_with_them_counts_more(num_plain, expected_s):
    cost = StepCost([1, 101], [1.0, 1.0])
    for _ in range(100):
        cost.on_step(1, 9, 1.4)
    for _ in range(num_plain):
        cost.on_step(1, 0, 1.0)
    assert drafted_s(cost, 1, 9) == pytest.approx([1.4], rel=0.01)
    cost.on_step(1, 9, 1.2)
    assert drafted_s(cost, 1, 9) == pytest.approx([expected_s], abs=0.02)


def timed(*seconds):
    now = [0.0]
    times = DraftTime(lambda: now[0])
    for each in seconds:
        times.add(each)
    return times, now


def test_the_first_call_does_not_count():
    assert timed()[0].token_s == timed(9.0)[0].token_s == 0.0
    assert timed(9.0, 2.0, 4.0)[0].token_s == pytest.approx(3.0)


def test_a_long_call_counts_as_twice_the_mean():
    calm, _ = timed(*[1.0] * 30)
    calm.add(1000.0)
    assert 1.0 < calm.token_s <= 1.0 + 0.1 * MAX_EXCESS


def test_drafts_are_tried_again_after_a_while():
    times, now = timed(1.0, 1.0, 1.0)
    now[0] += 3 * HALF_LIFE_S
    assert times.token_s == pytest.approx(1 / 8)
    times.add(1.0)
    assert times.token_s == pytest.approx(1.0)

import pytest

from service.engine.drafting.draft_time import HALF_LIFE_S, MAX_EXCESS, DraftTime


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

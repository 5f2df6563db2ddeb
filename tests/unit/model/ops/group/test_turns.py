"""Whose device is the thread's current one."""

from __future__ import annotations

from model.ops.group.turns import in_turn
from tests.support.fake_ranks import FakeRank


def test_rank_0_is_current_between_operations():
    log: list[tuple[object, ...]] = []
    ranks = [FakeRank(number, log) for number in range(3)]
    assert [(number, rank.number, log[-1]) for number, rank in in_turn(ranks)] == [
        (number, number, ("use", number)) for number in range(3)
    ]
    assert log == [("use", 0), ("use", 1), ("use", 2), ("use", 0)]

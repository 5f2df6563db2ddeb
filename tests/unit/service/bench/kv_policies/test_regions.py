"""Allocators of contiguous regions: no two overlap, what is given back merges, the books balance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from service.bench.kv_policies.policies import BestFit, Buddy
from service.engine.kv.block_pool import OutOfBlocks

ALLOCATORS = {"best-fit": BestFit, "buddy": Buddy}


class RegionMachine(RuleBasedStateMachine):
    """Allocate and free at random, and compare with a plain set of held blocks."""

    make = BestFit

    @initialize(num_blocks=st.integers(1, 200))
    def start(self, num_blocks):
        self.regions = type(self).make(num_blocks)
        self.held: list[range] = []

    @rule(count=st.integers(1, 80))
    def take(self, count):
        if not self.regions.fits(count):
            with pytest.raises(OutOfBlocks):
                self.regions.take(count)
            return
        region = self.regions.take(count)
        assert count <= len(region) < 2 * count
        assert all(set(region).isdisjoint(other) for other in self.held)
        assert 0 <= region.start < region.stop <= self.regions.num_blocks
        self.held.append(region)

    @rule(number=st.integers(0, 1000))
    def give_back(self, number):
        if self.held:
            self.regions.give_back(self.held.pop(number % len(self.held)))

    @invariant()
    def books_balance(self):
        if not hasattr(self, "regions"):
            return
        self.regions.check_invariants()
        assert self.regions.num_free == self.regions.num_blocks - sum(map(len, self.held))

    def teardown(self):
        if hasattr(self, "regions"):
            for region in self.held:
                self.regions.give_back(region)
            self.regions.check_invariants()
            largest = self.regions.num_blocks
            if isinstance(self.regions, Buddy):
                largest = 1 << (largest.bit_length() - 1)
            assert self.regions.fits(largest)


class BuddyMachine(RegionMachine):
    make = Buddy


TestBestFit = RegionMachine.TestCase
TestBuddy = BuddyMachine.TestCase


@given(st.integers(1, 500), st.integers(1, 500))
def test_best_fit_wastes_nothing_of_an_empty_pool(num_blocks, count):
    regions = BestFit(num_blocks)
    taken = [regions.take(count) for _ in range(num_blocks // count)]
    assert {len(region) for region in taken} <= {count}
    assert not regions.fits(count)
    assert regions.num_free == num_blocks % count


def test_best_fit_takes_the_smallest_hole():
    regions = BestFit(20)
    first, _, third, _ = (regions.take(count) for count in (6, 2, 4, 8))
    regions.give_back(first)
    regions.give_back(third)
    assert regions.take(3) == range(8, 11)
    assert regions.take(6) == range(6)


def test_free_blocks_that_do_not_touch_hold_nothing_large():
    regions = BestFit(8)
    taken = [regions.take(2) for _ in range(4)]
    regions.give_back(taken[0])
    regions.give_back(taken[2])
    assert regions.num_free == 4
    assert not regions.fits(3)
    regions.give_back(taken[1])
    assert regions.take(6) == range(6)


def test_buddy_rounds_up_and_aligns():
    regions = Buddy(16)
    assert regions.take(3) == range(4)
    assert regions.take(5) == range(8, 16)
    assert regions.take(1) == range(4, 5)
    assert regions.num_free == 3
    assert not regions.fits(3)


def test_buddy_in_a_pool_that_is_no_power_of_two():
    regions = Buddy(983)  # 512 + 256 + 128 + 64 + 16 + 4 + 2 + 1
    taken = [regions.take(128) for _ in range(7)]
    assert len({region.start for region in taken}) == 7
    assert not regions.fits(128)
    assert regions.num_free == 87


@pytest.mark.parametrize("make", ALLOCATORS.values(), ids=ALLOCATORS)
def test_what_was_not_taken_cannot_be_given_back(make):
    regions = make(8)
    region = regions.take(2)
    with pytest.raises(AssertionError, match="was not taken"):
        regions.give_back(range(1, 3))
    regions.give_back(region)
    with pytest.raises(AssertionError, match="given back twice"):
        regions.give_back(region)


@pytest.mark.parametrize("make", ALLOCATORS.values(), ids=ALLOCATORS)
def test_broken_books_are_found(make):
    regions = make(8)
    region = regions.take(4)
    regions._taken.remove(region)
    with pytest.raises(AssertionError, match="are in none or in two pieces"):
        regions.check_invariants()

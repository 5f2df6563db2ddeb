"""Slots of adapters by themselves: which groups start, what is loaded where, and that none waits for ever."""

from __future__ import annotations

import random

import pytest

from model.sampling_params import SamplingParams
from model.weights.lora.adapter import LoraAdapter
from service.engine.request import AdapterSource, EngineRequest
from service.engine.scheduling.adapter_slots import MAX_OVERTAKEN, AdapterSlotPool
from service.engine.sequence import SequenceGroup


def group_of(number: int, name: str, *, loaded: bool = True) -> SequenceGroup:
    adapter = AdapterSource(name=name, path=name, digest=name) if name else None
    sampling = SamplingParams(max_tokens=1)
    group = SequenceGroup(
        EngineRequest(request_id=str(number), prompt=(1,), sampling=sampling, adapter=adapter), frozenset()
    )
    group.arrival, group.is_loaded = number, loaded
    group.adapter = LoraAdapter(name, 1, {}, 0) if name else None
    return group


class Bench:
    """Starts what may start, in order, at most `max_running` at once."""

    def __init__(self, num_slots: int, max_running: int = 4):
        self.pool, self.max_running = AdapterSlotPool(num_slots), max_running
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.num_arrived = 0
        self.loads: list[tuple[int, str]] = []

    def arrive(self, *names: str) -> None:
        for name in names:
            self.num_arrived += 1
            self.waiting.append(group_of(self.num_arrived, name))
            self.pool.add_group(self.waiting[-1])

    def step(self) -> list[str]:
        """Start groups, each load done before the next; return their adapters."""
        self.pool.start_step([group.branches[0] for group in self.running])
        started = []
        while len(self.running) < self.max_running:
            group = next(iter(self.pool.admissible(self.waiting)), None)
            if self.finish_loads():
                continue
            if group is None:
                break
            self.waiting.remove(group)
            self.running.append(group)
            self.pool.take(group)
            started.append(group.adapter_key)
        self.pool.check_invariants([group.branches[0] for group in self.running])
        assert len({group.adapter_key for group in self.running} - {""}) <= self.pool.num_slots
        return started

    def finish_loads(self) -> bool:
        """Return whether there were some."""
        loads = self.pool.drain_loads()
        for load in loads:
            self.pool.finish_load(load.slot)
        self.loads += [(load.slot, load.adapter.digest) for load in loads]
        return bool(loads)

    def end(self, index: int = 0) -> None:
        group = self.running.pop(index)
        self.pool.remove_group(group)


def test_groups_without_a_slot_are_passed_over():
    bench = Bench(1)
    bench.arrive("a", "b", "", "a")
    assert bench.step() == ["a", "", "a"]
    for _ in range(3):
        bench.end()
    assert bench.step() == ["b"]
    assert bench.loads == [(0, "a"), (0, "b")]


def test_a_free_slot_keeps_its_adapter_until_another_needs_it():
    bench = Bench(2, max_running=1)
    for name in "abacab":
        bench.arrive(name)
        bench.step()
        bench.end()
    assert bench.loads == [(0, "a"), (1, "b"), (1, "c"), (1, "b")]


def test_the_least_recently_used_is_overwritten():
    bench = Bench(2, max_running=1)
    for name in "abc":
        bench.arrive(name)
        bench.step()
        bench.end()
    assert bench.loads[-1] == (0, "c")


def test_a_group_that_waits_is_overtaken_a_bounded_number_of_times():
    bench = Bench(1)
    bench.arrive("a", "b")
    bench.step()
    overtaken = 0
    while bench.waiting and bench.waiting[0].adapter_key == "b":
        bench.arrive("a")
        overtaken += bench.step().count("a")
        bench.end()
        bench.step()
    assert overtaken <= MAX_OVERTAKEN
    assert "b" in {group.adapter_key for group in bench.running}


def test_any_order_ends():
    rng = random.Random(3)
    for num_slots in (1, 2, 3):
        bench = Bench(num_slots)
        for _ in range(400):
            bench.arrive(*rng.choices(["", "a", "a", "a", "b", "c", "d", "e"], k=rng.randrange(2)))
            bench.step()
            if bench.running and rng.random() < 0.6:
                bench.end(rng.randrange(len(bench.running)))
        num_steps = 0
        while bench.waiting or bench.running:
            bench.step()
            assert bench.running
            bench.end()
            num_steps += 1
        assert num_steps <= bench.num_arrived
        assert bench.pool.num_open == 0


def test_an_end_of_the_waiting_group_frees_what_was_kept_for_it():
    bench = Bench(1)
    bench.arrive("a", "b")
    bench.step()
    bench.arrive(*["a"] * (MAX_OVERTAKEN + 4))
    while len(bench.step()) or len(bench.running) > 1:
        bench.end()
    assert bench.waiting[0].adapter_key == "b"
    gone = bench.waiting.pop(0)
    bench.pool.remove_group(gone)
    assert bench.step()[:1] == ["a"]


def admissible(pool: AdapterSlotPool, groups: list[SequenceGroup]) -> list[str]:
    return [group.adapter_key for group in pool.admissible(groups)]


def waiting_in(pool: AdapterSlotPool, *names: str) -> list[SequenceGroup]:
    groups = [group_of(number, name) for number, name in enumerate(names)]
    for group in groups:
        pool.add_group(group)
    return groups


def test_a_group_starts_once_its_slot_is_written():
    pool = AdapterSlotPool(2)
    groups = waiting_in(pool, "a", "", "a", "b", "c")
    assert admissible(pool, groups) == [""]
    assert [load.adapter.digest for load in pool.drain_loads()] == ["a", "b"]
    assert admissible(pool, groups) == [""]
    assert pool.drain_loads() == ()
    pool.finish_load(1)
    assert admissible(pool, groups) == ["", "b"]
    pool.finish_load(0)
    assert admissible(pool, groups) == ["a", "", "a", "b"]


@pytest.mark.parametrize("num_steps_between", [0, 1])
def test_a_load_is_of_an_unused_slot_once_a_step_without_it_is_planned(num_steps_between):
    pool = AdapterSlotPool(1)
    first, second = waiting_in(pool, "a", "b")
    admissible(pool, [first])
    assert [load.is_unused for load in pool.drain_loads()] == [True], "never used"
    pool.finish_load(0)
    pool.start_step([])
    assert admissible(pool, [first]) == ["a"]
    pool.take(first)
    for _ in range(num_steps_between):
        pool.start_step([])
    pool.start_step([])
    admissible(pool, [second])
    assert [load.is_unused for load in pool.drain_loads()] == [num_steps_between > 0]


def test_a_written_slot_waits_for_its_group():
    """It is not given away while the group lacks blocks, but once the group is gone."""
    pool = AdapterSlotPool(1)
    groups = waiting_in(pool, "a", "b")
    admissible(pool, groups)
    [load] = pool.drain_loads()
    pool.finish_load(load.slot)
    for _ in range(3):
        pool.start_step([])
        assert admissible(pool, groups) == ["a"]
    assert pool.drain_loads() == ()
    pool.remove_group(groups.pop(0))
    assert admissible(pool, groups) == []
    assert [load.adapter.digest for load in pool.drain_loads()] == ["b"]


def test_a_slot_that_is_written_is_not_given_away_though_its_group_is_gone():
    pool = AdapterSlotPool(1)
    groups = waiting_in(pool, "a", "b")
    admissible(pool, groups)
    [load] = pool.drain_loads()
    pool.remove_group(groups.pop(0))
    assert admissible(pool, groups) == []
    assert pool.drain_loads() == ()
    pool.finish_load(load.slot)
    admissible(pool, groups)
    assert [load.slot for load in pool.drain_loads()] == [load.slot]

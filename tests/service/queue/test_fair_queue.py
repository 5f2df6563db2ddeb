"""The order and bounds of waiting jobs, equal in memory and in Redis."""

from __future__ import annotations

import asyncio
import random

import pytest

from model.sampling_params import BeamSearch, SamplingParams
from service.errors import EndReason
from service.queue.codec import pack_ids
from service.queue.interface import Bounds, ClaimBudget, QueueFull
from service.queue.job_cost import cost_of
from service.queue.messages import Cancel, Event, Usage
from service.queue.redis import worker as redis_worker
from tests.fakes.queue import fair_queue, queue_data
from tests.fakes.queue.queue_data import QueueData
from tests.support.queue_pair import memory_pair
from tests.support.wire import PATIENCE_S, make_event, make_events, make_job


def job_of(job_id: str, tenant: str, tokens: int = 10, **changes):
    return make_job(
        job_id, tenant=tenant, prompt=pack_ids([1]), sampling=SamplingParams(max_tokens=tokens - 1), **changes
    )


def long_job(number: int, num_tokens: int):
    return make_job(f"L{number}", tenant="a", prompt=pack_ids([1] * num_tokens), sampling=SamplingParams(max_tokens=8))


async def submit(queue, *jobs):
    for job in jobs:
        await queue.submit(job)


async def served(queue, count: int = 64, at_once: int = 1) -> list[str]:
    """Ids in the order in which they are claimed."""
    found = []
    while len(found) < count and (claims := await queue.fetch(at_once, 0.0)):
        found += [claim.job.job_id for claim in claims]
    return found


def test_what_a_job_counts_for():
    def cost(**sampling):
        return cost_of(make_job(sampling=SamplingParams(**sampling)))

    assert cost(max_tokens=10) == 13
    assert cost(max_tokens=10, n=2, best_of=3) == 33
    assert cost(max_tokens=10, beam=BeamSearch(width=4)) == 43
    assert cost(max_tokens=100_000) == 3 + 1024


async def test_a_tenants_jobs_keep_their_order(queue):
    await submit(queue, *(job_of(f"J{number}", "a") for number in (3, 1, 2, 11, 10)))
    assert await served(queue) == ["J3", "J1", "J2", "J11", "J10"]


@pytest.mark.parametrize("at_once", [1, 64])
async def test_tenants_take_turns(queue, at_once):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(6)))
    await submit(queue, *(job_of(f"B{number}", "b") for number in range(2)))
    await submit(queue, job_of("C0", "c"))
    order = await served(queue, at_once=at_once)
    assert order[0] == "A0"
    assert set(order[1:3]) == {"B0", "C0"}
    assert order.index("B1") <= 4
    assert order[-3:] == ["A3", "A4", "A5"]


async def test_turns_are_counted_in_tokens(queue):
    await submit(queue, *(job_of(f"A{number}", "a", tokens=100) for number in range(3)))
    await submit(queue, *(job_of(f"B{number}", "b", tokens=10) for number in range(12)))
    order = await served(queue)
    assert order[:12] == ["A0", *(f"B{number}" for number in range(10)), "A1"]


async def test_a_job_counts_for_what_it_did_cost_once_it_has_ended(queue):
    await submit(queue, *(job_of(f"A{number}", "a", tokens=500) for number in range(2)))
    await submit(queue, *(job_of(f"B{number}", "b", tokens=30) for number in range(8)))
    assert await served(queue, 2) == ["A0", "B0"]
    await queue.publish([make_event("A0", 1, EndReason.STOP)])  # of 4 tokens
    assert await served(queue, 2) == ["A1", "B1"]


async def test_a_job_that_ends_beyond_its_reckoning_counts_for_more(queue):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(2)))
    await submit(queue, *(job_of(f"B{number}", "b") for number in range(8)))
    assert await served(queue, 1) == ["A0"]
    usage = Usage(prompt_tokens=1, completion_tokens=54)
    await queue.publish([Event(job_id="A0", number=1, end=EndReason.STOP, usage=usage)])
    assert (await served(queue)).index("A1") == 6


async def test_an_end_reported_twice_counts_once(queue):
    await submit(queue, *(job_of(f"A{number}", "a", tokens=500) for number in range(2)), job_of("B0", "b", tokens=498))
    (claim,) = await queue.fetch(1, 0.0)
    for _ in range(3):
        await queue.publish([make_event(claim.job.job_id, 1, EndReason.STOP)])
    assert await served(queue, 2) == ["B0", "A1"]


async def test_claims_stop_where_the_room_ends(queue):
    await submit(queue, job_of("A0", "a"), *(long_job(number, 100) for number in range(4)))
    await submit(queue, make_job("N0", tenant="a", sampling=SamplingParams(max_tokens=8, n=3, best_of=3)))

    async def claimed(max_branches, num_tokens=None):
        claims = await queue.fetch(max_branches, 0.0, ClaimBudget(num_tokens=num_tokens))
        return [claim.job.job_id for claim in claims]

    assert await claimed(8, 0) == []
    assert await claimed(8, 150) == ["A0", "L0", "L1"]  # the last may be larger than what is left
    assert await claimed(0) == []
    await queue.publish(make_events("L1", range(1, 61)))
    await queue.hand_back(["L1"])
    assert await claimed(8, 130) == ["L1"]  # with its history
    assert await claimed(3) == ["L2", "L3", "N0"]


async def test_a_tenant_with_enough_leaves_the_reserved_room(queue):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(4)))
    budget = ClaimBudget(num_reserved=2, num_slots=8, slots_by_tenant={"a": 5, "x": 1}, num_tenants=8)
    assert [claim.job.job_id for claim in await queue.fetch(4, 0.0, budget)] == ["A0", "A1"]
    assert list(await queue.fetch(2, 0.0, budget)) == []
    await submit(queue, job_of("B0", "b"), job_of("X0", "x", is_batch=True), job_of("C0", "c", is_batch=True))
    assert [claim.job.job_id for claim in await queue.fetch(2, 0.0, budget)] == ["B0", "C0"]
    assert [claim.job.job_id for claim in await queue.fetch(8, 0.0)] == ["A2", "A3", "X0"]


def lent(places: int, held: dict[str, int], **changes) -> ClaimBudget:
    """Nothing is free."""
    return ClaimBudget(
        **{"num_tokens": 0, "num_slots": places, "slots_by_tenant": held, "num_reclaimable_tokens": 1000} | changes
    )


async def claimed_from(queue, budget: ClaimBudget, num_branches: int = 0) -> list[str]:
    return [claim.job.job_id for claim in await queue.fetch(num_branches, 0.0, budget)]


async def test_who_holds_nothing_may_claim_what_is_lent_to_others(queue):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(9)))
    await submit(queue, *(job_of(f"B{number}", "b") for number in range(9)))
    assert await claimed_from(queue, lent(8, {"a": 8})) == ["B0", "B1", "B2", "B3"]
    assert await claimed_from(queue, lent(8, {"a": 8, "b": 4})) == []
    await submit(queue, job_of("C0", "c"), job_of("D0", "d"))
    assert sorted(await claimed_from(queue, lent(8, {"a": 8, "b": 4}, num_tokens=None), -4)) == ["C0", "D0"]


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_free_place_elsewhere_is_better_than_one_that_is_lent(open_queue, kind, monkeypatch):
    """Another worker has its time to claim the job; one that is alone need not wait."""
    of = {"memory": queue_data, "redis": redis_worker}[kind]
    monkeypatch.setattr(of, "RECLAIM_AFTER_S", 60.0)
    data = QueueData()
    full, idle = [memory_pair(data) if kind == "memory" else await open_queue() for _ in range(2)]
    await submit(full, job_of("B0", "b"))
    assert await claimed_from(full, lent(8, {"a": 8})) == ["B0"]
    assert await claimed_from(idle, ClaimBudget(), 8) == []
    await submit(full, job_of("C0", "c", priority=7), job_of("D0", "d", priority=-7))
    assert await claimed_from(full, lent(8, {"a": 8})) == []
    assert await claimed_from(idle, ClaimBudget(), 1) == ["C0"]
    monkeypatch.setattr(of, "RECLAIM_AFTER_S", 0.0)
    assert await claimed_from(full, lent(8, {"a": 8})) == ["D0"]


async def test_who_waits_for_others_hears_of_them_at_once(queue):
    await submit(queue, job_of("A0", "a"))
    assert list(await queue.fetch(0, 0.05, lent(8, {"a": 8}))) == []
    waiting = asyncio.create_task(queue.fetch(0, PATIENCE_S, lent(8, {"a": 8})))
    while not waiting.done():
        await asyncio.sleep(0.05)  # until it waits, and then once
        await submit(queue, job_of("B0", "b"))
    (claim,) = await waiting
    assert claim.job.job_id == "B0"


async def test_who_asks_for_little_may_have_it_whole(queue):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(9)))
    await submit(queue, *(job_of(f"B{number}", "b") for number in range(5)))
    assert await claimed_from(queue, lent(8, {"a": 6, "b": 1, "c": 1})) == ["B0", "B1"]
    assert await claimed_from(queue, lent(8, {"a": 4, "b": 3, "c": 1})) == []


async def test_nothing_is_lent_with_a_tenant_for_each_place(queue):
    await submit(queue, *(job_of(f"{name}0", name) for name in "efgh"))
    assert await claimed_from(queue, lent(4, dict.fromkeys("abcd", 1))) == []
    assert len(await claimed_from(queue, lent(4, {"a": 2, "b": 1, "c": 1}))) == 1


async def test_a_first_job_may_be_larger_than_a_share_where_places_are_free(queue):
    wide = {"prompt": pack_ids([1]), "sampling": SamplingParams(max_tokens=8, n=5, best_of=5)}
    await submit(queue, make_job("B0", tenant="b", **wide), make_job("B1", tenant="b", **wide))
    assert await claimed_from(queue, lent(8, {"a": 8})) == []
    assert await claimed_from(queue, lent(8, {"a": 7}, num_tokens=None, num_reserved=2), 1) == ["B0"]
    assert await claimed_from(queue, lent(16, {"a": 16})) == ["B1"]


async def test_neither_batch_work_nor_too_many_tokens_call_anything_back(queue):
    await submit(queue, job_of("B0", "b", is_batch=True))
    await submit(queue, *(make_job(f"C{number}", tenant="c", prompt=pack_ids([1] * 60)) for number in range(4)))
    assert await claimed_from(queue, lent(8, {"a": 8}, num_reclaimable_tokens=0)) == []
    assert await claimed_from(queue, lent(8, {"a": 8}, num_reclaimable_tokens=100)) == ["C0", "C1"]
    assert await claimed_from(queue, ClaimBudget()) == []


async def test_a_job_that_comes_back_may_claim_what_is_lent(queue):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(4)), job_of("B0", "b"))
    claims = await queue.fetch(5, 0.0)
    await queue.hand_back([claim.job.job_id for claim in claims])
    assert await claimed_from(queue, lent(4, {"a": 4})) == ["B0"]
    assert await claimed_from(queue, lent(4, {"a": 4, "b": 1})) == []
    assert sorted(await claimed_from(queue, ClaimBudget(), 8)) == ["A0", "A1", "A2", "A3"]


async def test_who_was_away_has_saved_up_nothing(queue):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(10)))
    assert await served(queue, 5) == [f"A{number}" for number in range(5)]
    await submit(queue, *(job_of(f"B{number}", "b") for number in range(5)))
    order = await served(queue)
    assert [job_id[0] for job_id in order[:6]].count("A") == 3


async def test_priority_is_for_a_tenants_own_jobs(queue):
    await submit(queue, job_of("A0", "a"), job_of("A1", "a"), job_of("A2", "a", priority=-1))
    await submit(queue, job_of("B0", "b"), job_of("B1", "b", priority=-100))
    order = await served(queue)
    assert [job_id for job_id in order if job_id[0] == "A"] == ["A2", "A0", "A1"]
    assert [job_id for job_id in order if job_id[0] == "B"] == ["B1", "B0"]
    assert {order[0][0], order[1][0]} == {"A", "B"}


async def test_batch_work_is_the_lowest_lane(queue):
    await submit(queue, job_of("X0", "x", is_batch=True), job_of("X1", "x", is_batch=True))
    await submit(queue, *(job_of(f"A{number}", "a", tokens=500) for number in range(3)))
    assert await served(queue) == ["A0", "A1", "A2", "X0", "X1"]


async def test_old_batch_work_has_its_turn(monkeypatch):
    queue = memory_pair()
    await submit(queue, job_of("X0", "x", is_batch=True), *(job_of(f"A{number}", "a") for number in range(3)))
    monkeypatch.setattr(fair_queue, "BATCH_AGE_S", 0.0)
    assert (await served(queue)).index("X0") < 2


async def test_old_batch_work_has_its_turn_in_redis(open_queue, redis):
    queue = await open_queue()
    await submit(queue, job_of("X0", "x", is_batch=True), *(job_of(f"A{number}", "a") for number in range(3)))
    redis.zincrby("{quire}:waiting:jobs:batch:x", -fair_queue.BATCH_AGE_S - 1, "X0")
    assert (await served(queue)).index("X0") < 2


async def test_what_waits_is_counted(queue):
    await submit(queue, job_of("A0", "a", 10), job_of("A1", "a", 20, is_batch=True), job_of("B0", "b", 40))
    backlog = await queue.backlog("a")
    assert (backlog.num_jobs, backlog.num_tokens, backlog.num_own_tokens) == (3, 70, 30)
    assert (await queue.backlog("unknown")).num_own_tokens == 0
    await queue.cancel(Cancel(job_id="A1", reason=EndReason.CANCELLED))
    assert (await queue.backlog("a")).num_tokens == 50
    await served(queue)
    backlog = await queue.backlog("a")
    assert (backlog.num_jobs, backlog.num_tokens, backlog.num_own_tokens) == (0, 0, 0)


async def test_a_place_in_the_queue(queue):
    await submit(queue, job_of("A0", "a"), job_of("A1", "a"), job_of("B0", "b"), job_of("A2", "a", priority=-5))
    assert [await queue.queue_position(job_id) for job_id in ("A2", "A0", "A1", "B0", "C")] == [0, 1, 2, 0, None]
    (claim,) = await queue.fetch(1, 0.0)
    assert await queue.queue_position(claim.job.job_id) is None


async def test_how_much_may_wait(queue):
    bounds = Bounds(max_jobs=5, max_tokens=100, max_tokens_per_tenant=60)
    await queue.submit(job_of("A0", "a", 1000), bounds)  # alone it always finds room
    with pytest.raises(QueueFull) as full:
        await queue.submit(job_of("A1", "a", 10), bounds)
    assert (full.value.of_tenant, full.value.num_jobs, full.value.num_tokens) == (True, 1, 1000)
    with pytest.raises(QueueFull) as full:
        await queue.submit(job_of("B0", "b", 10), bounds)
    assert (full.value.of_tenant, full.value.num_jobs, full.value.num_tokens) == (False, 1, 1000)
    assert await served(queue) == ["A0"]
    for number in range(5):
        await queue.submit(job_of(f"T{number}", f"t{number}", 10), bounds)
    with pytest.raises(QueueFull) as full:
        await queue.submit(job_of("T5", "t5", 1), bounds)
    assert (full.value.of_tenant, full.value.num_jobs) == (False, 5)
    await queue.submit(job_of("T0", "t0", 10), bounds)  # accepted before
    await queue.submit(job_of("T5", "t5", 1))
    assert (await queue.queue_state()).num_waiting == 6


async def test_a_job_that_comes_back_goes_first_and_costs_no_second_turn(queue):
    await submit(queue, *(job_of(f"A{number}", "a") for number in range(3)), job_of("B0", "b"))
    (claim,) = await queue.fetch(1, 0.0)
    await queue.hand_back([claim.job.job_id])
    assert (await queue.backlog("a")).num_tokens == 30
    order = await served(queue)
    assert order[0] == "A0"
    assert order[1] == "B0"


async def test_redis_serves_as_memory_does(open_queue):
    chance = random.Random(4)
    queues = [memory_pair(), await open_queue()]
    waiting = []
    for number in range(600):
        act = chance.random()
        if act < 0.5 or not waiting:
            job = job_of(
                f"J{number}", chance.choice("abcd"), chance.randrange(2, 50), priority=chance.choice((0, 0, -3, 7)),
                is_batch=chance.random() < 0.2,
            )  # fmt: skip
            waiting.append(job.job_id)
            for queue in queues:
                await queue.submit(job)
        elif act < 0.6:
            job_id = waiting.pop(chance.randrange(len(waiting)))
            for queue in queues:
                await queue.cancel(Cancel(job_id=job_id, reason=EndReason.CANCELLED))
        else:
            most = chance.randrange(-2, 4)
            held = {name: chance.randrange(1, 9) for name in chance.sample("abcdefg", chance.randrange(5))}
            budget = ClaimBudget(
                num_tokens=chance.choice((None, 0, 40)), num_reserved=chance.randrange(3),
                num_slots=chance.choice((0, 8, 16)), slots_by_tenant=held, num_tenants=chance.randrange(len(held), 9),
                num_reclaimable_tokens=chance.choice((0, 5, 1000)),
            )  # fmt: skip
            claimed = [[claim.job.job_id for claim in await queue.fetch(most, 0.0, budget)] for queue in queues]
            assert claimed[0] == claimed[1]
            waiting = [job_id for job_id in waiting if job_id not in claimed[0]]
            back = [job_id for job_id in claimed[0] if chance.random() < 0.2]
            waiting += back
            for queue in queues:
                await queue.hand_back(back)
                await queue.publish([make_event(one, 1, EndReason.STOP) for one in claimed[0] if one not in back])
        counts = [await queue.backlog("a") for queue in queues]
        assert counts[0] == counts[1]
        assert counts[0].num_jobs == len(waiting)

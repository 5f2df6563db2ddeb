"""The worker that claims a job among several: the one with its prefix, or a less busy one."""

from __future__ import annotations

import pytest

from service.queue.codec import pack_ids
from service.queue.interface import ClaimBudget
from service.queue.prefixes import MAX_HELD
from service.queue.redis import worker as redis_worker
from tests.support.wire import make_job

CHAT = list(range(200))


@pytest.fixture
async def workers(open_queue, monkeypatch):
    """Two workers that leave jobs to each other for ever; both have claimed once."""
    monkeypatch.setattr(redis_worker, "KEEP_S", 1e9)
    found = [await open_queue("one"), await open_queue("other")]
    for worker in (*found, *found):
        await worker.renew()
        await claimed(worker)
    return found


async def claimed(worker, num_held=0, num_free=64):
    claims = await worker.fetch(num_free, 0.0, ClaimBudget(num_held=num_held))
    return [claim.job.job_id for claim in claims]


def chat(job_id, num_tokens=200, first=0, **changes):
    return make_job(job_id, prompt=pack_ids([first, *CHAT[1:num_tokens]]), **changes)


async def test_a_chat_goes_on_where_it_was(workers):
    one, other = workers
    await one.submit(chat("J1", 130))
    assert await claimed(one) == ["J1"]
    await one.submit(chat("J2"))
    assert await claimed(other) == []
    assert await claimed(one, num_held=1) == ["J2"]
    await one.submit(chat("J3", first=7))
    await one.submit(chat("J4", tenant="stranger"))
    assert {*await claimed(other)} == {"J3", "J4"}
    await one.submit(chat("J5", first=7))
    assert await claimed(one, num_held=2) == []
    assert await claimed(other, num_held=2) == ["J5"]


@pytest.mark.parametrize("trouble", ["busy", "full", "gone", "slow"])
async def test_a_worker_in_trouble_keeps_no_job_from_others(workers, trouble, monkeypatch):
    one, other = workers
    await one.submit(chat("J1"))
    assert await claimed(one) == ["J1"]
    await claimed(one, num_held=MAX_HELD + (trouble == "busy"), num_free=0 if trouble == "full" else 64)
    await one.submit(chat("J2"))
    if trouble == "gone":
        await hand_all_back(one)
    if trouble == "slow":
        monkeypatch.setattr(redis_worker, "KEEP_S", 0.0)
    assert "J2" in await claimed(other)


async def hand_all_back(worker):
    await worker.hand_back(["J1"])
    await worker.retire("card")


async def test_jobs_of_a_burst_are_shared_out(workers):
    one, other = workers
    for number in range(16):
        await one.submit(make_job(f"J{number}", prompt=pack_ids([number])))
    taken = {one: 0, other: 0}
    while sum(taken.values()) < 16:
        before = dict(taken)
        for worker in workers:
            taken[worker] += len(await claimed(worker, num_held=taken[worker]))
        assert taken != before
    assert abs(taken[one] - taken[other]) <= 6


async def test_a_worker_alone_leaves_nothing(open_queue):
    only = await open_queue("only")
    for number in range(2):
        await only.submit(chat(f"J{number}"))
    assert await claimed(only, num_held=200) == ["J0", "J1"]

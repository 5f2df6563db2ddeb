"""The unclaimed jobs that a queue reports: their number in each lane, and since when they wait."""

from __future__ import annotations

import asyncio

from service.errors import EndReason
from service.queue.interface import QUEUE_LANES, Lane
from service.queue.keys import waiting_since
from service.queue.messages import Cancel
from tests.support.wire import PATIENCE_S, make_job

LEASE_S = 0.3
NOBODY = Lane(0, None)
CLOCKS_PART_S = 0.05
"""Largest difference of clocks within a test: Redis time is advanced by our own clock."""


def matches(lane: Lane, num_jobs: int, span: tuple[float, float]) -> bool:
    """Return whether this many wait, the first since a moment of the span."""
    begin_s, end_s = span
    return lane.num_jobs == num_jobs and begin_s - CLOCKS_PART_S <= lane.oldest_at_s <= end_s + CLOCKS_PART_S


async def test_new_jobs_wait_in_their_lane_from_their_acceptance_on(join):
    gateway, worker = await join(), await join()
    assert (await gateway.queue_state()).lanes == dict.fromkeys(QUEUE_LANES, NOBODY)
    began_s = await gateway.now_s()
    await gateway.submit(make_job("first"))
    first = (began_s, await gateway.now_s())
    await asyncio.sleep(2 * CLOCKS_PART_S)
    began_s = await gateway.now_s()
    await gateway.submit(make_job("hurried", priority=-100, tenant="other"))
    await gateway.submit(make_job("batch", is_batch=True))
    later = (began_s, await gateway.now_s())
    state = await gateway.queue_state()
    assert matches(state.lanes["normal"], 2, first)
    assert matches(state.lanes["batch"], 1, later)
    assert state.num_waiting == 3
    await gateway.cancel(Cancel(job_id="first", reason=EndReason.CANCELLED))
    assert matches((await gateway.queue_state()).lanes["normal"], 1, later)
    assert len(await worker.fetch(4, 1.0)) == 2
    assert (await gateway.queue_state()).lanes == dict.fromkeys(QUEUE_LANES, NOBODY)


async def test_jobs_that_come_back_wait_from_then_on(join):
    gateway, worker = await join(), await join()
    await gateway.submit(make_job("A"))
    await worker.fetch(1, 1.0)
    await asyncio.sleep(2 * CLOCKS_PART_S)
    began_s = await gateway.now_s()
    await worker.hand_back(["A"])
    state = await gateway.queue_state()
    assert matches(state.lanes["returned"], 1, (began_s, await gateway.now_s()))
    assert state.lanes["normal"] == NOBODY
    for cause in ("first", "second"):
        await worker.fetch(1, 1.0)
        await worker.hand_back(["A"], cause)
    state = await gateway.queue_state()
    assert matches(state.lanes["suspect"], 1, (began_s, await gateway.now_s()))
    assert state.lanes["returned"] == NOBODY
    assert state.num_waiting == 1


async def test_leases_that_run_are_counted(join):
    gateway, one, other = await join(), await join(lease_s=LEASE_S), await join(lease_s=PATIENCE_S)
    assert (await gateway.queue_state()).num_leases == 0
    await one.renew()
    await other.renew()
    assert (await gateway.queue_state()).num_leases == 2
    async with asyncio.timeout(PATIENCE_S):
        while (await gateway.queue_state()).num_leases > 1:
            await asyncio.sleep(0.02)
    await other.retire("other")
    assert (await gateway.queue_state()).num_leases == 0


async def test_what_another_version_left_behind_is_not_reported_for_ever(open_queue, redis):
    gateway = await open_queue()
    redis.zadd(waiting_since("normal"), {"claimed by a script that knows no times": 5.0})
    await gateway.submit(make_job("first"))
    assert (await gateway.queue_state()).lanes["normal"].num_jobs == 1

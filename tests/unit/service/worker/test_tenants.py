"""A flood that found the workers empty, and others who come later: queue, job_loop and engine together."""

import asyncio
import time

from service.errors import EndReason
from service.queue.messages import Cancel
from tests.fakes.queue.queue_data import QueueData
from tests.support.queue_pair import memory_pair
from tests.support.worker_harness import NUM_SLOTS, WorkerHarness, alone, read_events

LONG, SHORT = 900, 6
STEP_S = 0.005
LEASE_S = 0.6


async def begun(*followed):
    """The first event of each."""
    async with asyncio.timeout(10):
        return [await anext(events) for events in followed]


async def flood(worker, max_tokens=LONG):
    """Jobs of one tenant that have every place: of each its id, its events and the first of them."""
    jobs = [await worker.submit([n, 2], tenant="flood", max_tokens=max_tokens) for n in range(NUM_SLOTS)]
    firsts = await begun(*(events for _, events in jobs))
    return [(*job, first) for job, first in zip(jobs, firsts, strict=True)]


async def test_newcomers_are_answered_before_the_flood_and_none_loses_a_token():
    async with WorkerHarness(memory_pair(), step_s=STEP_S) as worker:
        jobs, logs = await flood(worker), worker.queue.data.logs
        small = [await worker.submit([n, 3], tenant=f"small{n}", max_tokens=SHORT) for n in range(6)]
        for n, (_, events) in enumerate(small):
            assert (await read_events(events))[:2] == (alone([n, 3], SHORT), EndReason.LENGTH)
        assert not any(logs[job_id].ended_at_s for job_id, *_ in jobs)
        assert worker.engine._engine.stats().num_reclaimed > 0
        so_far = [len(logs[job_id].events) for job_id, *_ in jobs]
        async with asyncio.timeout(10):
            while any(len(logs[job_id].events) <= count for (job_id, *_), count in zip(jobs, so_far, strict=True)):
                await asyncio.sleep(0.01)  # all go on
        for n, (job_id, events, first) in enumerate(jobs):
            await worker.queue.cancel(Cancel(job_id=job_id, reason=EndReason.CANCELLED))
            tokens, end, _ = await read_events(events, [first])
            assert (tokens, end) == (alone([n, 2], len(tokens)), EndReason.CANCELLED)


async def test_who_waits_to_go_on_hears_cancels_and_deadlines():
    async with WorkerHarness(memory_pair(), step_s=STEP_S) as worker:
        jobs = [await worker.submit([n, 2], tenant="flood", max_tokens=LONG) for n in range(2)]
        late, events_of_late = await worker.submit([8], tenant="flood", max_tokens=LONG, deadline_s=time.time() + 2.0)
        wide, events_of_wide = await worker.submit([9], tenant="flood", max_tokens=LONG)
        *_, first_of_late, first_of_wide = await begun(*(events for _, events in jobs), events_of_late, events_of_wide)
        small = [await worker.submit([n, 3], tenant=f"small{n}", max_tokens=LONG) for n in range(2)]
        await begun(*(events for _, events in small))
        running = {sequence.request_id.partition("/")[0] for sequence in worker.engine._engine.running}
        assert not running & {late, wide}, "the youngest have left"
        await worker.queue.cancel(Cancel(job_id=wide, reason=EndReason.CANCELLED))
        assert (await read_events(events_of_wide, [first_of_wide]))[1] is EndReason.CANCELLED
        assert (await read_events(events_of_late, [first_of_late]))[1] is EndReason.DEADLINE


async def test_a_dead_workers_newcomers_go_on_at_once_where_a_flood_has_all_places():
    data = QueueData()

    def join(name):
        return WorkerHarness(memory_pair(data, lease_s=LEASE_S), step_s=STEP_S, name=name)

    async with join("first") as first, join("second") as second:
        second.claims_nothing()
        small = [await first.submit([n, 3], tenant=f"small{n}", max_tokens=60) for n in range(2)]
        firsts = await begun(*(events for _, events in small))
        first.claims_nothing()
        second.claims_again()
        jobs = await flood(second)
        await first.die()
        for n, ((_, events), heard) in enumerate(zip(small, firsts, strict=True)):
            assert (await read_events(events, [heard]))[:2] == (alone([n, 3], 60), EndReason.LENGTH)
        assert not any(data.logs[job_id].ended_at_s for job_id, *_ in jobs)

"""The job loop between a queue in memory and an engine on a scripted model."""

import asyncio
import itertools
import time

import pytest

from service.errors import EndReason
from service.queue.codec import unpack_ids
from service.queue.interface import QueueUnavailable
from service.queue.messages import Cancel
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.fakes.queue.worker import MemoryWorkerQueue
from tests.support.queue_pair import QueuePair, memory_pair
from tests.support.worker_harness import VOCAB, WorkerHarness, alone, read_events


async def test_jobs_come_back_as_events():
    async with WorkerHarness(memory_pair()) as worker:
        jobs = [await worker.submit([n, 1], max_tokens=3 + n) for n in range(12)]
        for n, (_, events) in enumerate(jobs):
            tokens, end, usage = await read_events(events)
            assert (tokens, end) == (alone([n, 1], 3 + n), EndReason.LENGTH)
            assert (usage.prompt_tokens, usage.completion_tokens) == (2, 3 + n)
        assert worker.job_loop.num_open == 0


async def test_an_id_outside_the_vocabulary_is_refused_by_the_worker_too():
    async with WorkerHarness(memory_pair()) as worker:
        _, events = await worker.submit([1, VOCAB])
        assert (await read_events(events))[:2] == ([], EndReason.INVALID)


@pytest.mark.parametrize(("model", "end"), [("m", EndReason.LENGTH), ("other", EndReason.INVALID)])
async def test_a_job_of_another_model_is_not_answered_by_this_one(model, end):
    async with WorkerHarness(memory_pair()) as worker:
        _, events = await worker.submit([1], model=model)
        tokens, how, _ = await read_events(events)
        assert (how, bool(tokens)) == (end, end is EndReason.LENGTH)


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.STOP])
async def test_a_cancel_ends_the_job_with_its_reason(reason):
    async with WorkerHarness(memory_pair(), step_s=0.01) as worker:
        job_id, events = await worker.submit([1], max_tokens=3900)
        await worker.queue.cancel(Cancel(job_id=job_id, reason=reason))
        tokens, end, _ = await read_events(events)
        assert end is reason
        assert tokens == alone([1], len(tokens))


async def test_a_cancel_of_one_branch_leaves_the_others():
    async with WorkerHarness(memory_pair(), step_s=0.01) as worker:
        job_id, events = await worker.submit([1], max_tokens=40, n=2, best_of=2)
        first = await anext(events)  # it runs
        await worker.queue.cancel(Cancel(job_id=job_id, reason=EndReason.STOP, branch=0))
        async with asyncio.timeout(10):
            parts = [*first.parts, *[part async for event in events for part in event.parts]]
        ends = {part.branch: part.end for part in parts if part.end is not None}
        assert ends == {0: EndReason.STOP, 1: EndReason.LENGTH}
        assert sum(len(unpack_ids(part.tokens)) for part in parts if part.branch == 1) == 40


async def test_a_deadline_ends_a_running_job():
    async with WorkerHarness(memory_pair(), step_s=0.01) as worker:
        _, events = await worker.submit([1], deadline_s=time.time() + 0.2, max_tokens=3900)
        tokens, end, _ = await read_events(events)
        assert end is EndReason.DEADLINE
        assert tokens == alone([1], len(tokens))


def pair_of(worker: MemoryWorkerQueue) -> QueuePair:
    return QueuePair(MemoryGatewayQueue(worker.data), worker)


class AbsentQueue(MemoryWorkerQueue):
    """Refuses every third write."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    async def publish(self, events):
        if next(self.calls) % 3 == 0:
            raise QueueUnavailable("away")
        return await super().publish(events)


async def test_no_event_is_lost_while_the_queue_is_away():
    async with WorkerHarness(pair_of(AbsentQueue())) as worker:
        jobs = [await worker.submit([n], max_tokens=20) for n in range(6)]
        for n, (_, events) in enumerate(jobs):
            assert (await read_events(events))[0] == alone([n], 20)


class RecordingQueue(MemoryWorkerQueue):
    """Remembers the numbers of the events of each step."""

    def __init__(self):
        super().__init__()
        self.numbers: list[list[int]] = []

    async def publish(self, events):
        self.numbers.append([event.number for event in events])
        return await super().publish(events)


async def test_first_events_precede_events_of_running_jobs():
    queue = RecordingQueue()
    async with WorkerHarness(pair_of(queue), step_s=0.002) as worker:
        _, first = await worker.submit([1], max_tokens=100)
        begun = await anext(first)
        _, second = await worker.submit([2], max_tokens=3)
        assert (await read_events(second))[0] == alone([2], 3)
        assert (await read_events(first, [begun]))[0] == alone([1], 100)
    together = [numbers for numbers in queue.numbers if 1 in numbers and len(numbers) > 1]
    assert together
    assert all(numbers[0] == 1 for numbers in together)


async def test_a_drained_courier_claims_nothing_more():
    async with WorkerHarness(memory_pair()) as worker:
        _, first = await worker.submit([1], max_tokens=200)
        begun = await anext(first)
        await worker.job_loop.drain(10, asyncio.Event())
        assert (await read_events(first, [begun]))[1] is EndReason.LENGTH
        await worker.submit([2])
        await asyncio.sleep(0.1)
        assert (await worker.queue.queue_state()).num_waiting == 1
        assert worker.job_loop.num_open == 0

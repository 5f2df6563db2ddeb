"""Messages for tests, and readers of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from model.sampling_params import SamplingParams
from service.errors import EndReason
from service.queue.codec import pack_ids
from service.queue.interface import QueueUnavailable
from service.queue.messages import Event, Job, Part, Usage, WorkerCard
from tests.support.queue_pair import QueuePair

OpenQueue = Callable[..., Awaitable[QueuePair]]
PATIENCE_S = 10.0


async def persist(act: Callable[[], Awaitable], within_s: float = 2 * PATIENCE_S):
    """Repeat a call until the queue answers."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await act()
            except QueueUnavailable:
                await asyncio.sleep(0.05)


def make_job(job_id: str = "JOB1", **changes) -> Job:
    fields = {
        "job_id": job_id,
        "tenant": "t",
        "prompt": pack_ids([1, 2, 3]),
        "sampling": SamplingParams(max_tokens=8),
        "submitted_at_s": 1.0,
        "feed": "door1",
    }
    return Job(**{**fields, **changes})


def make_event(job_id: str, number: int, end: EndReason | None = None) -> Event:
    usage = None if end is None else Usage(prompt_tokens=3, completion_tokens=number)
    return Event(job_id=job_id, number=number, parts=(Part(tokens=pack_ids([number])),), end=end, usage=usage)


def make_events(job_id: str, numbers: Iterable[int]) -> list[Event]:
    return [make_event(job_id, number) for number in numbers]


def make_card(worker_id: str, **changes) -> WorkerCard:
    fields = {"model": "m", "ready": True, "max_model_len": 64, "num_blocks": 8, "block_size": 16, "beat_at_s": 0.0}
    return WorkerCard(worker_id=worker_id, **{**fields, **changes})


async def take(events: AsyncIterator[Event], count: int) -> list[int]:
    """Return the numbers of the next events."""
    async with asyncio.timeout(PATIENCE_S):
        return [(await anext(events)).number for _ in range(count)]


async def read_to_end(events: AsyncIterator[Event]) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in events]


@dataclass(frozen=True)
class Ended:
    """End of a followed job."""

    numbers: list[int]
    reason: EndReason | None


async def follow_begun(queue: QueuePair) -> AsyncIterator[Event]:
    """Follow JOB1 after its first event, which was published after its submission and claim."""
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1]))
    assert await take(events, 1) == [1]
    return events


async def outcome(events: AsyncIterator[Event]) -> Ended:
    seen = await read_to_end(events)
    return Ended([event.number for event in seen], seen[-1].end)

"""A process of `quire bench queue`: a gateway or a worker."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import uvloop

from model.sampling_params import SamplingParams
from service.errors import EndReason
from service.queue.codec import pack_ids
from service.queue.interface import GatewayQueue, WorkerQueue
from service.queue.messages import Event, Job, Part, Usage
from service.queue.redis.connect import open_gateway_queue, open_worker_queue

PROMPT = pack_ids(range(147))
USAGE = Usage(prompt_tokens=147, completion_tokens=1)


async def gateway(queue: GatewayQueue, number: int, num_jobs: int, num_tokens: int) -> None:
    """Submit jobs and read all their events."""
    job_ids = [f"bench-{number}-{index}" for index in range(num_jobs)]
    followers = []
    for job_id in job_ids:
        followers.append(queue.follow(job_id))  # following it after submission would count as another gateway's job
        job = Job(
            job_id=job_id,
            tenant="t",
            prompt=PROMPT,
            sampling=SamplingParams(max_tokens=num_tokens),
            submitted_at_s=time.time(),
            feed=f"bench-{number}",
        )
        await queue.submit(job)

    async def read(events: AsyncIterator[Event]) -> int:
        return sum([1 async for _ in events])

    num_read = sum(await asyncio.gather(*map(read, followers)))
    if num_read != num_jobs * num_tokens:
        raise AssertionError(f"{num_read} events were read of {num_jobs * num_tokens}")


async def worker(queue: WorkerQueue, num_jobs: int, num_tokens: int, num_in_step: int) -> None:
    """Claim jobs and publish one token for each per step."""
    published: dict[str, int] = {}
    num_left = num_jobs
    while num_left:
        if len(published) < min(num_in_step, num_left):
            for claim in await queue.fetch(min(num_in_step, num_left) - len(published), 0.2):
                published[claim.job.job_id] = 0
        events = [_event(job_id, number + 1, num_tokens) for job_id, number in published.items()]
        if events:
            await queue.publish(events)
        for event in events:
            published[event.job_id] = event.number
            if event.end is not None:
                del published[event.job_id]
                num_left -= 1


def _event(job_id: str, number: int, num_tokens: int) -> Event:
    parts = (Part(tokens=pack_ids([1000 + number])),)
    if number < num_tokens:
        return Event(job_id=job_id, number=number, parts=parts)
    return Event(job_id=job_id, number=number, parts=parts, end=EndReason.LENGTH, usage=USAGE, choices=(0,))


async def main(role: str, number: int, url: str, *work: int) -> None:
    num_jobs, num_tokens, num_workers, num_gateways, num_in_step = work
    if role == "gateway":
        gateway_queue = await open_gateway_queue(url)
        await _measure(gateway(gateway_queue, number, _share(num_jobs, num_gateways, number), num_tokens))
        await gateway_queue.close()
    else:
        worker_queue = await open_worker_queue(url)
        await _measure(worker(worker_queue, _share(num_jobs, num_workers, number), num_tokens, num_in_step))
        await worker_queue.close()


async def _measure(work: Coroutine[Any, Any, None]) -> None:
    """Report ready, wait for the start, and print the CPU seconds of `work`."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    started_s = time.process_time()
    await work
    print("cpu", time.process_time() - started_s, flush=True)


def _share(count: int, num_parts: int, number: int) -> int:
    return count // num_parts + (number < count % num_parts)


if __name__ == "__main__":
    role, number, url, *work = sys.argv[1:]
    uvloop.run(main(role, int(number), url, *map(int, work)))

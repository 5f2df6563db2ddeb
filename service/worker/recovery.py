"""How requests outlive their workers: the lease that says who is alive, the jobs of those who are not, and a job's past
as the engine takes it up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from service.engine.request import BranchHistory
from service.queue.codec import unpack_floats, unpack_ids
from service.queue.interface import Lease, QueueUnavailable, WorkerQueue
from service.queue.messages import Event, WorkerCard

log = logging.getLogger("quire.recovery")

BEATS_PER_LEASE = 10 / 3
"""A lease of 10 s is renewed every 3 s: two beats may be lost."""
MAX_LOOK_S = 1.0
"""How often the living look for the dead."""
FRESH_CARD_S = 3.5
"""A worker that has not said for longer that it is ready takes no job for certain."""


async def keep_lease(
    queue: WorkerQueue,
    silent_s: Callable[[], float],
    on_lease: Callable[[Lease], Awaitable[None]],
    take_over: Callable[[], Awaitable[None]],
) -> None:
    """Renew the lease for ever, as long as the engine makes progress, and `take_over` from those whose lease ran out.

    `silent_s`: seconds since the engine's thread last came round. One that hangs loses its jobs to others, though this
    loop goes on; `on_lease` hears what every renewal says.
    """
    beat_s = queue.lease_s / BEATS_PER_LEASE
    look_s = min(MAX_LOOK_S, beat_s)
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        try:
            if loop.time() >= due_s and silent_s() < beat_s:
                due_s = loop.time() + beat_s
                await on_lease(await queue.renew())
            await take_over()
        except QueueUnavailable as error:
            log.warning("no heartbeat: %s", error)
            due_s = loop.time()
        await asyncio.sleep(look_s)


async def has_replacement(queue: WorkerQueue, ours: WorkerCard) -> bool:
    """Whether another worker of our model is there and takes jobs. Raises QueueUnavailable."""
    now_s, cards = await queue.now_s(), await queue.workers()
    return any(
        card.ready and card.model == ours.model and now_s - card.beat_at_s < FRESH_CARD_S
        for card in cards
        if card.worker_id != ours.worker_id
    )


def num_scored_tokens(events: Iterable[Event]) -> int:
    """Of the prompt, those whose log-probabilities were told, and the first, which has none; 0 where none were."""
    told = sum(len(part.tokens) // 4 for event in events for part in event.parts if part.is_prompt)
    return told + 1 if told else 0


def branch_histories(events: Iterable[Event]) -> tuple[BranchHistory, ...]:
    """What was told of each branch, in order of their numbers, from a job's events so far. Log-probabilities are added
    in the order in which the engine added them, so that branches rank as they would have."""
    token_ids: dict[int, list[int]] = {}
    ends, sums = {}, {}
    for event in events:
        for part in event.parts:
            if part.is_prompt:
                continue
            token_ids.setdefault(part.branch, []).extend(unpack_ids(part.tokens))
            if part.end is not None:
                ends[part.branch] = part.end
            if part.logprobs is not None:
                for logprob in unpack_floats(part.logprobs.chosen):
                    sums[part.branch] = sums.get(part.branch, 0.0) + logprob
    return tuple(
        BranchHistory(
            token_ids=tuple(token_ids.get(branch, ())), end=ends.get(branch), sum_logprob=sums.get(branch, 0.0)
        )
        for branch in range(max(token_ids, default=-1) + 1)
    )

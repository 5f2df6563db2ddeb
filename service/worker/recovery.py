from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from service.engine.request import BranchHistory
from service.errors import EndReason
from service.queue.codec import unpack_floats, unpack_ids
from service.queue.interface import Lease, QueueUnavailable, WorkerQueue
from service.queue.messages import Event

log = logging.getLogger("quire.recovery")

BEATS_PER_LEASE = 10 / 3
"""Two beats of a 10 s lease may be lost."""
MAX_LOOK_S = 1.0
"""Interval of checks for expired leases."""


async def keep_lease(
    queue: WorkerQueue,
    silent_s: Callable[[], float],
    on_lease: Callable[[Lease], Awaitable[None]],
    take_over: Callable[[], Awaitable[None]],
) -> None:
    """Renew the lease while the engine makes progress; call `take_over` for expired leases.

    `silent_s`: seconds since the engine's last turn; a hung engine loses its lease. `on_lease` gets each renewal.
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


def num_scored_tokens(events: Iterable[Event]) -> int:
    """Count prompt tokens with log-probabilities, plus the first token, which has none; 0 if none."""
    num_sent = sum(len(part.tokens) // 4 for event in events for part in event.parts if part.is_prompt)
    return num_sent + 1 if num_sent else 0


def branch_histories(events: Iterable[Event]) -> tuple[BranchHistory, ...]:
    """Return each branch's history. Log-probabilities are summed in order, so branches rank as if uninterrupted."""
    token_ids: dict[int, list[int]] = {}
    ends: dict[int, EndReason] = {}
    sums: dict[int, float] = {}
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

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgpack

from service.errors import EndReason
from service.observability.logs import fields
from service.queue import keys
from service.queue.codec import WireError, decode, encode
from service.queue.interface import ALONE_FOR_EVENTS, NEAR_DEATHS_S, UNLIMITED_BUDGET, Claim, ClaimBudget, Lease
from service.queue.job_cost import RECLAIM_AFTER_S
from service.queue.messages import Cancel, DeadLetter, Event, Job, WorkerCard
from service.queue.prefixes import KEEP_S, MAX_HELD, MAX_RATIO
from service.queue.redis.claims import ClaimedJob, ClaimedJobs
from service.queue.redis.link import STREAM_START, RedisLink
from service.queue.redis.worker_cards import WorkerCards

log = logging.getLogger("quire.redis")

MAX_CANCELS_READ = 1024
LEFT_S = 0.003
"""Claim interval while jobs wait for another worker."""


class RedisWorkerQueue:
    """Implementation of WorkerQueue. `name` is unique among live workers; a successor inherits its predecessor's."""

    def __init__(self, link: RedisLink, name: str, cancels_from: str, lease_s: float) -> None:
        self.lease_s = lease_s
        self._link = link
        self._owner = name
        self._claimed = ClaimedJobs(link, name, lease_s)
        self._cards = WorkerCards(link)
        self._may_have_more = True  # unacknowledged claims, or a predecessor's
        self._may_have_predecessor = True
        self._is_fetching_over = False
        self._cancels_from = cancels_from

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget = UNLIMITED_BUDGET) -> Sequence[Claim]:
        give_up_s = time.monotonic() + wait_s
        queues = (keys.RETURNED, keys.WAITING)
        # Claimed entries are deleted, so any entry is new, unless the budget may exclude it.
        bell = dict.fromkeys(queues, "$" if budget.is_restricted(max_branches) else "0-0")
        has_rung = False
        while not self._is_fetching_over:
            claims = await self._claim(queues, max_branches, budget)
            left_s = give_up_s - time.monotonic()
            if claims or left_s <= 0:
                return claims
            if has_rung:  # another worker has the job, or should get it
                await asyncio.sleep(LEFT_S)
            has_rung = True
            if not await self._claimed.observe(self._link.block(lambda redis, ms: redis.xread(bell, 1, ms), left_s)):
                return claims
        return ()

    async def fetch_suspect(self) -> Claim | None:
        claims = await self._claim((keys.SUSPECTS,), 1, UNLIMITED_BUDGET)
        return claims[0] if claims else None

    def stop_fetching(self) -> None:
        self._is_fetching_over = True

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        return await self._claimed.publish(events)

    async def renew(self) -> Lease:
        return await self._claimed.renew()

    async def take_over(self) -> int:
        # After an outage, an expired lease may belong to a live worker whose heartbeats failed too.
        may_judge = self._claimed.contact_s() >= self.lease_s
        has_predecessor = int(self._may_have_predecessor)
        asked = [int(may_judge), self._owner, has_predecessor, NEAR_DEATHS_S]
        num_back: int = await self._claimed.run("take_over", [keys.DEATHS], asked)
        self._may_have_predecessor = False
        if num_back:
            log.warning("jobs of dead workers go back to the queue %s", fields(num_jobs=num_back))
        return num_back

    async def hand_back(self, job_ids: Collection[str], cause: str | None = None) -> None:
        await self._claimed.hand_back(job_ids, "" if cause is None else cause[:500] or "the engine died")

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        answer = await self._link.block(
            lambda redis, block_ms: redis.xread({keys.CANCELS: self._cancels_from}, MAX_CANCELS_READ, block_ms), wait_s
        )
        if not answer and await self._link.is_past_end(keys.CANCELS, self._cancels_from):
            self._cancels_from = STREAM_START
        cancels = []
        for entry_id, entry in (entry for _, entries in answer for entry in entries):
            self._cancels_from = entry_id.decode()
            try:
                cancels.append(decode(Cancel, entry.get(keys.PAYLOAD, b"")))
            except WireError as error:
                log.error("unreadable cancel %s", fields(entry=self._cancels_from, error=error))
        return cancels

    async def now_s(self) -> float:
        return await self._link.now_s()

    async def announce(self, card: WorkerCard) -> bool:
        return await self._cards.put(card)

    async def workers(self) -> Sequence[WorkerCard]:
        return await self._cards.fresh()

    async def retire(self, worker_id: str) -> None:
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(keys.worker(worker_id))
            pipeline.zrem(keys.WORKERS, worker_id)
            pipeline.hdel(keys.WAITING_LOADS, self._owner)
            if not self._claimed.job_ids():
                pipeline.zrem(keys.LEASES, self._owner)
            await pipeline.execute()

    async def close(self) -> None:
        await self._link.close()

    async def _claim(self, queues: Sequence[str], max_branches: int, budget: ClaimBudget) -> list[Claim]:
        """Claim jobs; if the call is cut off, the next one returns them."""
        ask_for_more, self._may_have_more, self._may_have_predecessor = self._may_have_more, True, False
        held = msgpack.packb(list(self._claimed.job_ids())) if ask_for_more else b""
        args = [self._owner, max_branches, self.lease_s, int(ask_for_more), held]
        args += _budget_args(budget)
        opened = [await self._open(answer) for answer in await self._claimed.run_fenced("claim", queues, args)]
        pairs = [pair for pair in opened if pair is not None]
        for _, job in pairs:
            self._claimed.add(job)
        self._may_have_more = False
        return [claim for claim, _ in pairs]

    async def _open(self, answer: Sequence[Any]) -> tuple[Claim, ClaimedJob] | None:
        """Decode a claimed job. Return None if the job ends here."""
        job_id, message, attempt, standing, deaths, cause, stops = answer
        job_id, cause = job_id.decode(), cause.decode(errors="replace")
        fence = f"{attempt} {self._owner}"
        if standing == b"deadly":
            await self._dead_letter(job_id, fence, message, deaths, cause)
            return None
        try:
            job = decode(Job, message)
            claimed = ClaimedJob(job, attempt, self._owner, message)  # checks names first
        except ValueError as error:
            log.error("unreadable job %s", fields(job=job_id, error=error))
            await self._end(job_id, fence, EndReason.INVALID)
            return None
        if attempt > 1:
            claimed = ClaimedJob(job, attempt, self._owner, message, await self._read_log(claimed.log))
        try:
            history = tuple(decode(Event, payload) for payload in claimed.events)
        except WireError as error:
            log.error("unreadable log %s", fields(job=job_id, error=error))
            history = (Event(job_id=job_id, number=0),)
        if [event.number for event in history] != list(range(1, len(history) + 1)) or any(
            event.end for event in history
        ):
            log.error("a history with gaps %s", fields(job=job_id, attempt=attempt))
            await self._end(job_id, fence, EndReason.LOST)
            return None
        return Claim(job, attempt, ALONE_FOR_EVENTS[standing.decode()], history, _stops(job_id, stops)), claimed

    async def _read_log(self, log_key: str) -> list[bytes]:
        async with self._link.commands() as redis:
            return [entry.get(keys.PAYLOAD, b"") for _, entry in await redis.xrange(log_key)]

    async def _end(self, job_id: str, fence: str, reason: EndReason) -> None:
        await self._claimed.run("end", [], [job_id, fence, reason.value])

    async def _dead_letter(self, job_id: str, fence: str, message: bytes, deaths: int, cause: str) -> None:
        letter = DeadLetter(
            job_id=job_id, job=message, deaths=deaths, cause=cause, buried_at_s=await self._link.now_s()
        )
        await self._claimed.run(
            "end", [keys.DEAD], [job_id, fence, EndReason.POISONED.value, keys.DEAD_MAX_ENTRIES, encode(letter)]
        )
        log.error("a job that crashes engines was dead-lettered %s", fields(job=job_id, deaths=deaths, cause=cause))


def _budget_args(budget: ClaimBudget) -> list[Any]:
    """Return ARGV[15] to ARGV[25] of `claim.lua`."""
    num_tokens = "" if budget.num_tokens is None else budget.num_tokens
    slots = msgpack.packb(dict(budget.slots_by_tenant))
    shares = [budget.num_slots, slots, budget.num_tenants, budget.num_reclaimable_tokens, RECLAIM_AFTER_S]
    spread = ["" if budget.num_held is None else budget.num_held, KEEP_S, MAX_HELD, MAX_RATIO]
    return [num_tokens, budget.num_reserved, *shares, *spread]


def _stops(job_id: str, packed: bytes) -> tuple[Cancel, ...]:
    """Unpack a list of "<branch> <reason>"."""
    stops = []
    for word in msgpack.unpackb(packed) if packed else ():
        branch, _, reason = word.partition(" ")
        stops.append(Cancel(job_id=job_id, branch=int(branch), reason=EndReason(reason)))
    return tuple(stops)


async def last_cancel(link: RedisLink) -> str:
    async with link.commands() as redis:
        last = await redis.xrevrange(keys.CANCELS, count=1)
    return last[0][0].decode() if last else STREAM_START

"""Claims that outlive lost data. Redis may come back empty or without its last second of writes: a worker keeps a job's
events until shortly after its end, asserts its claims after an outage and completes the logs."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

import msgpack

from service.observability.logs import fields
from service.queue import keys
from service.queue.codec import encode
from service.queue.interface import NEAR_DEATHS_S, Lease, QueueUnavailable
from service.queue.messages import Event, Job
from service.queue.redis.link import DataLost, RedisLink
from service.queue.redis.script_args import deadline_arg, new_state

log = logging.getLogger("quire.redis")

SETTLED_KEPT_S = 3.0
"""Time to keep an ended job here: longer than `appendfsync everysec` may lose."""
REPLAY_EVENTS = 512
MAX_CALL_BYTES = 4 << 20
"""Maximum bytes per call; Redis takes 16 MB (`proto-max-bulk-len`)."""

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class ClaimedJob:
    """Claimed job. `events[n - 1]` is event `n`, encoded."""

    def __init__(self, job: Job, attempt: int, owner: str, message: bytes, events: Sequence[bytes] = ()) -> None:
        """Raises ValueError for an invalid job or feed name."""
        self.job_id = job.job_id
        self.attempt = attempt
        self.fence = f"{attempt} {owner}"
        self.feed = keys.feed(job.feed)
        self.log = keys.events(job.job_id)
        self.events = list(events)
        self.end = ""
        self.restore_args: tuple[Any, ...] = (job.job_id, attempt, message, new_state(job, attempt), deadline_arg(job))

    @property
    def num_bytes(self) -> int:
        return len(self.restore_args[2])


class ClaimedJobs:
    def __init__(self, link: RedisLink, owner: str, lease_s: float) -> None:
        self._link = link
        self._owner = owner
        self._lease_s = lease_s
        self._held: dict[str, ClaimedJob] = {}
        self._settled: deque[tuple[float, ClaimedJob]] = deque()
        self._lost: set[str] = set()  # not yet reported to the caller
        self._ending: set[str] = set()  # last event may already be written
        self._death = ""  # the engine's, until reported
        self._epoch = ""
        self._num_failures = 1
        self._num_overcome = 0
        self._asserting = asyncio.Lock()
        self._contact_since_s: float | None = None

    def job_ids(self) -> Collection[str]:
        return self._held.keys()

    def add(self, held: ClaimedJob) -> None:
        self._held[held.job_id] = held
        self._lost.discard(held.job_id)

    def contact_s(self) -> float:
        """Return the seconds for which Redis has answered."""
        return 0.0 if self._contact_since_s is None else time.monotonic() - self._contact_since_s

    async def observe(self, call: Awaitable[Answer]) -> Answer:
        try:
            answer = await call
        except QueueUnavailable:
            self.doubt()
            raise
        if self._contact_since_s is None:
            self._contact_since_s = time.monotonic()
        return answer

    def doubt(self) -> None:
        """Require the claims to be asserted before the next write."""
        self._num_failures += 1
        self._contact_since_s = None

    async def run(self, script: str, script_keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self.observe(self._link.script(script, script_keys, args))

    async def run_fenced(self, script: str, script_keys: Sequence[str], args: Sequence[Any]) -> Any:
        await self.assert_claims()
        try:
            return await self.run(script, script_keys, [self._epoch, *args])
        except DataLost:
            await self.assert_claims()
            return await self.run(script, script_keys, [self._epoch, *args])

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        # A job whose end was written but not acknowledged is not lost, as publish is repeated.
        ending = {event.job_id for event in events if event.end is not None and event.job_id in self._held}
        self._ending |= ending
        await self.assert_claims()
        known = [(self._held[event.job_id], event, encode(event)) for event in events if event.job_id in self._held]
        strangers = {event.job_id for event in events} - self._held.keys()
        for part in in_calls(known, lambda item: len(item[2])):
            await self._publish_part(part)
        self._ending -= ending
        return self._take_lost() | strangers

    async def _publish_part(self, part: Sequence[tuple[ClaimedJob, Event, bytes]]) -> None:
        items = [
            (job, event.number, payload, "" if event.end is None else event.end.value) for job, event, payload in part
        ]
        answer = await self.run_fenced("publish", *_packed(items, [event for _, event, _ in part]))
        refused = {part[index - 1][1].job_id for index in answer}
        for job, event, payload in part:
            if event.job_id not in refused:
                self._note_published(job, event, payload)
        self._lose(refused)

    async def renew(self) -> Lease:
        await self.assert_claims()
        held = msgpack.packb([word for job in self._held.values() for word in (job.job_id, job.fence)])
        runs_suspects, *lost = await self.run_fenced("renew", [keys.ALONE], [self._owner, self._lease_s, held])
        # `publish` reports a job that has ended meanwhile.
        self._lose({job_id.decode() for job_id in lost} - self._ending)
        return Lease(self._take_lost(), bool(runs_suspects))

    async def hand_back(self, job_ids: Collection[str], cause: str) -> None:
        await self.assert_claims()
        held = [self._held[job_id] for job_id in job_ids if job_id in self._held]
        if held or cause:
            fences = msgpack.packb([word for job in held for word in (job.job_id, job.fence)])
            self._death = self._death or secrets.token_hex(8)
            args = [cause, fences, NEAR_DEATHS_S, self._death]
            await self.run("hand_back", [keys.DEATHS] if cause else [], args)
            self._death = ""
        for job in held:
            self._held.pop(job.job_id, None)

    def _note_published(self, job: ClaimedJob, event: Event, payload: bytes) -> None:
        if event.number == len(job.events) + 1:
            job.events.append(payload)
        if event.end is not None and self._held.pop(event.job_id, None) is not None:
            job.end = event.end.value
            now_s = time.monotonic()
            self._settled.append((now_s, job))
            while self._settled[0][0] < now_s - SETTLED_KEPT_S:
                self._settled.popleft()

    def _lose(self, job_ids: Collection[str]) -> None:
        lost = [job_id for job_id in job_ids if self._held.pop(job_id, None) is not None]
        if lost:
            log.warning("jobs were lost to other workers %s", fields(num_jobs=len(lost), first=lost[0]))
            self._lost.update(lost)

    def _take_lost(self) -> frozenset[str]:
        lost, self._lost = frozenset(self._lost), set()
        return lost

    async def assert_claims(self) -> None:
        if self._num_overcome == self._num_failures:
            return
        async with self._asserting:
            while (num_failures := self._num_failures) != self._num_overcome:
                await self._restore()
                self._num_overcome = num_failures

    async def _restore(self) -> None:
        jobs = {held.job_id: held for _, held in self._settled} | self._held
        epoch, lost = "", set[str]()
        for part in in_calls(list(jobs.values()), lambda job: job.num_bytes) or [[]]:
            items = msgpack.packb([word for job in part for word in job.restore_args], use_bin_type=False)
            args = [self._epoch, secrets.token_hex(8), self._owner, self._lease_s, items]
            answer, *not_ours = await self.run("restore", [], args)
            lost |= {job_id.decode() for job_id in not_ours}
            if epoch and answer.decode() != epoch:
                self.doubt()  # lost again
                return
            epoch = answer.decode()
        if self._epoch and epoch != self._epoch:
            log.error("redis lost its data; our jobs are restored %s", fields(num_jobs=len(jobs)))
        self._epoch = epoch
        self._lose(lost - self._ending)
        await self._refill([held for job_id, held in jobs.items() if job_id not in lost])

    async def _refill(self, jobs: Sequence[ClaimedJob]) -> None:
        if not jobs:
            return

        async def last_numbers() -> list[int]:
            async with self._link.commands() as redis, redis.pipeline(transaction=False) as pipeline:
                for job in jobs:
                    pipeline.xrevrange(job.log, count=1)
                ends = await pipeline.execute()
            return [int(last[0][0].partition(b"-")[0]) if last else 0 for last in ends]

        items = []
        for job, last in zip(jobs, await self.observe(last_numbers()), strict=True):
            for number in range(last + 1, len(job.events) + 1):
                items.append((job, number, job.events[number - 1], job.end if number == len(job.events) else ""))
        if items:
            log.warning("events that redis lost are written again %s", fields(num_events=len(items)))
        for part in in_calls(items, lambda item: len(item[2]), REPLAY_EVENTS):
            script_keys, args = _packed(part)
            await self.run("publish", script_keys, [self._epoch, *args])


def in_calls(items: Sequence[Item], num_bytes: Callable[[Item], int], max_items: int | None = None) -> list[list[Item]]:
    """Split items into calls of at most MAX_CALL_BYTES."""
    calls: list[list[Item]] = []
    num_free_bytes = 0
    for item in items:
        size = num_bytes(item)
        if not calls or size > num_free_bytes or len(calls[-1]) == max_items:
            calls.append([])
            num_free_bytes = MAX_CALL_BYTES
        calls[-1].append(item)
        num_free_bytes -= size
    return calls


def _packed(
    items: Sequence[tuple[ClaimedJob, int, bytes, str]], events: Sequence[Event] = ()
) -> tuple[list[str], list[Any]]:
    """Return keys and arguments of `publish.lua`; decoded `events` give actual costs."""
    feeds = {feed: number for number, feed in enumerate(dict.fromkeys(job.feed for job, *_ in items), 1)}
    packed: list[int | str | bytes] = []
    for job, number, payload, end in items:
        packed += (feeds[job.feed], job.job_id, job.fence, number, payload, end)
    costs = [
        word
        for index, event in enumerate(events, 1)
        if event.usage is not None
        for word in (index, event.usage.prompt_tokens + event.usage.completion_tokens)
    ]
    args = [len(feeds), msgpack.packb(packed, use_bin_type=False), msgpack.packb(costs)]
    return [*feeds, *(job.log for job, *_ in items)], args

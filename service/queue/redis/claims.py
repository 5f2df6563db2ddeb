"""The jobs that a worker holds: its fence on each, what it told of them, and how both outlive a failing Redis.

Redis may come back from an outage without its last second, or without anything. So what was told of a job is kept here
as long as the job, and a while longer: after an outage the claims are asserted again and each log is filled up.
"""

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
from service.queue.redis.job_state import deadline_arg, new_state
from service.queue.redis.link import DataLost, RedisLink

log = logging.getLogger("quire.redis")

SETTLED_KEPT_S = 3.0
"""How long an ended job is remembered: longer than what `appendfsync everysec` may lose."""
REPLAY_EVENTS = 512
MAX_ACT_BYTES = 4 << 20
"""Of messages that one script is given, but for a longer one that goes alone: Redis takes 16 MB in an argument
(`proto-max-bulk-len`), and what was refused once, or took too long, would be said again for ever."""

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class ClaimedJob:
    """A claimed job: where its events go, and all of them so far, encoded (event `n` is at `n - 1`)."""

    def __init__(self, job: Job, attempt: int, owner: str, message: bytes):
        """Raises ValueError for a job whose names are none."""
        self.job_id = job.job_id
        self.attempt = attempt
        self.fence = f"{attempt} {owner}"
        self.feed = keys.feed(job.feed)
        self.log = keys.events(job.job_id)
        self.told: list[bytes] = []
        self.end = ""
        self._restoring = (job.job_id, attempt, message, new_state(job, attempt), deadline_arg(job))

    @property
    def num_bytes(self) -> int:
        """About as many as `restoring` takes."""
        return len(self._restoring[2])

    @property
    def restoring(self) -> tuple[Any, ...]:
        """The five things that `restore.lua` wants of a job."""
        return self._restoring


class ClaimedJobs:
    """Of one worker. Every call to Redis that may meet an outage goes through `watch`."""

    def __init__(self, link: RedisLink, owner: str, lease_s: float):
        self._link = link
        self._owner = owner
        self._lease_s = lease_s
        self._held: dict[str, ClaimedJob] = {}
        self._settled: deque[tuple[float, ClaimedJob]] = deque()
        self._lost: set[str] = set()  # not yet told to whoever runs them
        self._ending: set[str] = set()  # whose last event is on its way, or may be there
        self._death = ""  # name of the engine's, while it is being told
        self._epoch = ""
        self._num_failures = 1
        self._num_overcome = 0  # of them
        self._asserting = asyncio.Lock()
        self._contact_since_s: float | None = None

    def job_ids(self) -> Collection[str]:
        return self._held.keys()

    def add(self, held: ClaimedJob) -> None:
        self._held[held.job_id] = held
        self._lost.discard(held.job_id)

    def contact_s(self) -> float:
        """How long Redis has answered without a failure."""
        return 0.0 if self._contact_since_s is None else time.monotonic() - self._contact_since_s

    async def watch(self, act: Awaitable[Answer]) -> Answer:
        """Notes whether Redis answered: after a failure nothing is sure."""
        try:
            answer = await act
        except QueueUnavailable:
            self.doubt()
            raise
        if self._contact_since_s is None:
            self._contact_since_s = time.monotonic()
        return answer

    def doubt(self) -> None:
        """Redis may have lost what we know; nothing is said before that is put right."""
        self._num_failures += 1
        self._contact_since_s = None

    async def run(self, script: str, script_keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self.watch(self._link.script(script, script_keys, args))

    async def run_sure(self, script: str, script_keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Of a script that wants the epoch first: our claims stand when it runs."""
        await self.assert_claims()
        try:
            return await self.run(script, script_keys, [self._epoch, *args])
        except DataLost:
            await self.assert_claims()
            return await self.run(script, script_keys, [self._epoch, *args])

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        """As WorkerQueue says."""
        # One that has ended by an act whose answer was lost is no longer ours, which is no loss: the act is done again.
        ending = {event.job_id for event in events if event.end is not None and event.job_id in self._held}
        self._ending |= ending
        await self.assert_claims()
        known = [(self._held[event.job_id], event, encode(event)) for event in events if event.job_id in self._held]
        strangers = {event.job_id for event in events} - self._held.keys()
        for some in in_acts(known, lambda told: len(told[2])):
            await self._publish_some(some)
        self._ending -= ending
        return self._take_lost() | strangers

    async def _publish_some(self, told: Sequence[tuple[ClaimedJob, Event, bytes]]) -> None:
        items = [
            (held, event.number, payload, "" if event.end is None else event.end.value) for held, event, payload in told
        ]
        answer = await self.run_sure("publish", *_packed(items, [event for _, event, _ in told]))
        refused = {told[index - 1][1].job_id for index in answer}
        for held, event, payload in told:
            if event.job_id not in refused:
                self._note_told(held, event, payload)
        self._lose(refused)

    async def renew(self) -> Lease:
        """As WorkerQueue says."""
        await self.assert_claims()
        held = msgpack.packb([word for held in self._held.values() for word in (held.job_id, held.fence)])
        runs_suspects, *lost = await self.run_sure("renew", [keys.ALONE], [self._owner, self._lease_s, held])
        # One that has ended meanwhile is no longer ours either, and its publishing says so.
        self._lose({job_id.decode() for job_id in lost} - self._ending)
        return Lease(self._take_lost(), bool(runs_suspects))

    async def hand_back(self, job_ids: Collection[str], cause: str) -> None:
        """As WorkerQueue says; an empty cause is none."""
        await self.assert_claims()
        held = [self._held[job_id] for job_id in job_ids if job_id in self._held]
        if held or cause:
            fences = msgpack.packb([word for job in held for word in (job.job_id, job.fence)])
            self._death = self._death or secrets.token_hex(8)
            told = [cause, fences, NEAR_DEATHS_S, self._death]
            await self.run("hand_back", [keys.DEATHS] if cause else [], told)
            self._death = ""
        for job in held:
            self._held.pop(job.job_id, None)

    def _note_told(self, held: ClaimedJob, event: Event, payload: bytes) -> None:
        if event.number == len(held.told) + 1:
            held.told.append(payload)
        if event.end is not None and self._held.pop(event.job_id, None) is not None:
            held.end = event.end.value
            now_s = time.monotonic()
            self._settled.append((now_s, held))
            while self._settled[0][0] < now_s - SETTLED_KEPT_S:
                self._settled.popleft()

    def _lose(self, job_ids: Collection[str]) -> None:
        lost = [job_id for job_id in job_ids if self._held.pop(job_id, None) is not None]
        if lost:
            log.warning("jobs were taken from us %s", fields(num_jobs=len(lost), first=lost[0]))
            self._lost.update(lost)

    def _take_lost(self) -> frozenset[str]:
        lost, self._lost = frozenset(self._lost), set()
        return lost

    async def assert_claims(self) -> None:
        """After an outage, before anything else is said: our claims hold or are lost, and logs have what we told."""
        if self._num_overcome == self._num_failures:
            return
        async with self._asserting:
            while (num_failures := self._num_failures) != self._num_overcome:
                await self._restore()
                self._num_overcome = num_failures

    async def _restore(self) -> None:
        jobs = {held.job_id: held for _, held in self._settled} | self._held
        epoch, lost = "", set()
        for some in in_acts(list(jobs.values()), lambda held: held.num_bytes) or [[]]:
            items = msgpack.packb([word for held in some for word in held.restoring], use_bin_type=False)
            asked = [self._epoch, secrets.token_hex(8), self._owner, self._lease_s, items]
            answer, *not_ours = await self.run("restore", [], asked)
            lost |= {job_id.decode() for job_id in not_ours}
            if epoch and answer.decode() != epoch:
                self.doubt()  # everything was lost again meanwhile
                return
            epoch = answer.decode()
        if self._epoch and epoch != self._epoch:
            log.error("redis has lost its data; our jobs are there again %s", fields(num_jobs=len(jobs)))
        self._epoch = epoch
        self._lose(lost - self._ending)
        await self._refill([held for job_id, held in jobs.items() if job_id not in lost])

    async def _refill(self, jobs: Sequence[ClaimedJob]) -> None:
        """Append what the logs of these jobs lack."""
        if not jobs:
            return

        async def last_numbers() -> list[int]:
            async with self._link.commands() as redis, redis.pipeline(transaction=False) as pipeline:
                for held in jobs:
                    pipeline.xrevrange(held.log, count=1)
                ends = await pipeline.execute()
            return [int(last[0][0].partition(b"-")[0]) if last else 0 for last in ends]

        items = []
        for held, last in zip(jobs, await self.watch(last_numbers()), strict=True):
            for number in range(last + 1, len(held.told) + 1):
                items.append((held, number, held.told[number - 1], held.end if number == len(held.told) else ""))
        if items:
            log.warning("events that redis lost are told again %s", fields(num_events=len(items)))
        for some in in_acts(items, lambda item: len(item[2]), REPLAY_EVENTS):
            script_keys, args = _packed(some)
            await self.run("publish", script_keys, [self._epoch, *args])


def in_acts(items: Sequence[Item], num_bytes: Callable[[Item], int], max_items: int | None = None) -> list[list[Item]]:
    """In their order, MAX_ACT_BYTES and `max_items` at most at once."""
    acts: list[list[Item]] = []
    room = 0
    for item in items:
        size = num_bytes(item)
        if not acts or size > room or len(acts[-1]) == max_items:
            acts.append([])
            room = MAX_ACT_BYTES
        acts[-1].append(item)
        room -= size
    return acts


def _packed(
    items: Sequence[tuple[ClaimedJob, int, bytes, str]], events: Sequence[Event] = ()
) -> tuple[list[str], list[Any]]:
    """Keys and arguments of `publish.lua` for events as (job, number, payload, end). `events`, the same as they were
    before, tell what jobs have cost; without them that stays as it was reckoned."""
    feeds = {feed: number for number, feed in enumerate(dict.fromkeys(held.feed for held, *_ in items), 1)}
    packed: list[int | str | bytes] = []
    for held, number, payload, end in items:
        packed += (feeds[held.feed], held.job_id, held.fence, number, payload, end)
    costs = [
        word
        for place, event in enumerate(events, 1)
        if event.usage is not None
        for word in (place, event.usage.prompt_tokens + event.usage.completion_tokens)
    ]
    args = [len(feeds), msgpack.packb(packed, use_bin_type=False), msgpack.packb(costs)]
    return [*feeds, *(held.log for held, *_ in items)], args

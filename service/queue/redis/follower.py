"""One job's events in order, each once: from the feed as long as they come in order, else from the job's log.

A follower expects one number after the other. Anything else than the expected one (a gap, a full buffer, silence for a
while, an outage) makes it read the log from there, so nothing needs to be remembered for a slow one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from service.errors import EndReason
from service.observability.logs import fields
from service.queue import keys
from service.queue.codec import WireError, decode
from service.queue.interface import QueueUnavailable
from service.queue.messages import Event, Job, Usage
from service.queue.redis.link import Outage, RedisLink

log = logging.getLogger("quire.redis")

BUFFER_EVENTS = 256
LOG_PAGE_EVENTS = 256
MAX_READS = 8
"""Logs read at once: thousands of followers may look for news together, and others want connections too."""
LOST_AFTER_S = 15.0
"""How long a job may be nowhere before nobody is expected to bring it back: a worker's lease and a half."""

Answer = TypeVar("Answer")


class JobLogs:
    """The event logs of all jobs. Waits for Redis as long as it takes, until `close`."""

    def __init__(self, link: RedisLink, submit: Callable[[Job], Awaitable[None]]):
        self._link = link
        self._submit = submit
        self._turns = asyncio.Semaphore(MAX_READS)
        self.is_closed = False

    async def read(self, job_id: str, start: int) -> Sequence[Event]:
        """At most LOG_PAGE_EVENTS events from number `start` on. Raises QueueUnavailable for a log that is broken, or
        when closed."""

        async def read() -> list[bytes]:
            async with self._link.commands() as redis:
                entries = await redis.xrange(keys.events(job_id), f"{start}-0", "+", count=LOG_PAGE_EVENTS)
            return [entry.get(keys.PAYLOAD, b"") for _, entry in entries]

        try:
            return [decode(Event, payload) for payload in await self._persist(read)]
        except WireError as error:
            raise QueueUnavailable(f"the log of job {job_id} cannot be read: {error}") from error

    async def is_lost(self, job_id: str) -> bool:
        """Whether nothing is left of a job, as after a FLUSHALL."""

        async def look() -> bool:
            async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
                pipeline.hexists(keys.JOBS, job_id)
                pipeline.exists(keys.events(job_id))
                is_there, has_log = await pipeline.execute()
            return not is_there and not has_log

        return await self._persist(look)

    async def submit_again(self, job: Job) -> None:
        """Nothing happens where it is there after all."""
        log.warning("a lost job is submitted again %s", fields(job=job.job_id))
        await self._persist(lambda: self._submit(job))

    async def _persist(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        outage = Outage("log")
        while True:
            try:
                async with self._turns:
                    return await attempt()
            except QueueUnavailable as error:
                if self.is_closed:
                    raise
                await asyncio.sleep(outage.failed(error))


class Follower:
    """An iterator over one job's events. Whoever holds it is its only holder: let go of it and it is gone."""

    def __init__(self, job_id: str, after: int, logs: JobLogs, accepted: Callable[[], Job | None]):
        self.job_id = job_id
        self.heard_at_s = _time_s()
        self._expected = after + 1
        self._logs = logs
        self._accepted = accepted
        self._lost_since_s: float | None = None
        self._buffer: deque[Event] = deque()
        self._is_behind = False
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None  # whoever iterates, for news

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> Event:
        while not self._buffer:
            if self._has_ended:
                raise StopAsyncIteration
            if self._logs.is_closed:
                raise QueueUnavailable("the queue was closed")
            if self._is_behind:
                await self._read_log()
            else:
                self._waiting = self._loop.create_future()
                await self._waiting
        return self._buffer.popleft()

    async def aclose(self) -> None:
        """Let go before the end."""
        self._has_ended = True
        self._buffer.clear()
        self._wake()

    def hear(self, event: Event) -> None:
        """An event from a feed; it may come twice, or too early."""
        if self._has_ended or event.number < self._expected:
            return
        if event.number == self._expected and len(self._buffer) < BUFFER_EVENTS and not self._is_behind:
            self._append(event)
        else:
            self._is_behind = True
        self._wake()

    def look(self) -> None:
        """Something may have passed the feed by: read the log."""
        self._is_behind = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _append(self, event: Event) -> None:
        self._buffer.append(event)
        self._expected = event.number + 1
        self.heard_at_s = self._loop.time()
        self._has_ended = event.end is not None

    async def _read_log(self) -> None:
        self._is_behind = False
        self.heard_at_s = _time_s()
        # The event before comes along: if the job ended with it, nothing will follow.
        events = await self._logs.read(self.job_id, max(1, self._expected - 1))
        for event in events:
            if self._has_ended:  # the feed was quicker, or we were closed
                return
            if event.number == self._expected:
                self._append(event)
            elif event.number > self._expected:
                raise QueueUnavailable(f"the queue has lost event {self._expected} of job {self.job_id}")
            elif event.end is not None:
                self._has_ended = True
        if len(events) == LOG_PAGE_EVENTS:
            self._is_behind = True
        if events:
            self._lost_since_s = None
        elif (self._expected > 1 or self._accepted()) and await self._logs.is_lost(self.job_id):
            await self._bear_loss()

    async def _bear_loss(self) -> None:
        """Redis has lost the job. Its worker brings it back, if it has one that lives; a job of which nothing was told
        can be submitted again; else it ends here."""
        if self._lost_since_s is None:
            self._lost_since_s = _time_s()
        job = self._accepted()
        if job is not None and self._expected == 1:
            await self._logs.submit_again(job)
        elif _time_s() - self._lost_since_s > LOST_AFTER_S:
            usage = Usage(prompt_tokens=0, completion_tokens=0)
            self._append(Event(job_id=self.job_id, number=self._expected, end=EndReason.LOST, usage=usage))


def _time_s() -> float:
    return asyncio.get_running_loop().time()

"""Events of one job in order, each once. After a gap, full buffer, silence or outage they come from the log, so a slow
follower needs no memory."""

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
"""Maximum concurrent log reads; others need connections too."""
LOST_AFTER_S = 15.0
"""Time for a missing job's worker to restore it."""

Answer = TypeVar("Answer")


class JobLogs:
    """Reader of job logs; waits out outages until `is_closed`."""

    def __init__(self, link: RedisLink, submit: Callable[[Job], Awaitable[None]]):
        self._link = link
        self._submit = submit
        self._turns = asyncio.Semaphore(MAX_READS)
        self.is_closed = False

    async def read(self, job_id: str, start: int) -> Sequence[Event]:
        """Return a page from number `start`. Raises QueueUnavailable for a broken log or when closed."""

        async def read() -> list[bytes]:
            async with self._link.commands() as redis:
                entries = await redis.xrange(keys.events(job_id), f"{start}-0", "+", count=LOG_PAGE_EVENTS)
            return [entry.get(keys.PAYLOAD, b"") for _, entry in entries]

        try:
            return [decode(Event, payload) for payload in await self._persist(read)]
        except WireError as error:
            raise QueueUnavailable(f"the log of job {job_id} cannot be read: {error}") from error

    async def is_lost(self, job_id: str) -> bool:
        async def look() -> bool:
            async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
                pipeline.hexists(keys.JOBS, job_id)
                pipeline.exists(keys.events(job_id))
                is_there, has_log = await pipeline.execute()
            return not is_there and not has_log

        return await self._persist(look)

    async def submit_again(self, job: Job) -> None:
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
        self._waiting: asyncio.Future[None] | None = None

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

    def take_arrived(self) -> Sequence[Event]:
        arrived = list(self._buffer)
        self._buffer.clear()
        return arrived

    async def aclose(self) -> None:
        self._has_ended = True
        self._buffer.clear()
        self._wake()

    def on_event(self, event: Event) -> None:
        """Take an event, which may be repeated or early."""
        if self._has_ended or event.number < self._expected:
            return
        if event.number == self._expected and len(self._buffer) < BUFFER_EVENTS and not self._is_behind:
            self._append(event)
        else:
            self._is_behind = True
        self._wake()

    def catch_up(self) -> None:
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
        # The preceding event may have ended the job.
        events = await self._logs.read(self.job_id, max(1, self._expected - 1))
        for event in events:
            if self._has_ended:
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
            await self._handle_loss()

    async def _handle_loss(self) -> None:
        """Resubmit a lost job without events; otherwise wait for its worker, then end it."""
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

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from weakref import ref

from service.observability.logs import fields
from service.queue import keys
from service.queue.codec import WireError, decode, decode_events
from service.queue.interface import QueueUnavailable
from service.queue.messages import Event, Job
from service.queue.redis.follower import Follower, JobLogs
from service.queue.redis.link import STREAM_START, Outage, RedisLink, order

log = logging.getLogger("quire.redis")

PAGE_ENTRIES = 64
FEED_BLOCK_S = 1.0
WATCH_BLOCK_S = 0.1
ADOPT_AFTER_S = 0.1
"""A job not submitted here by then belongs to another gateway."""
IDLE_CHECK_S = 5.0
SWEEP_S = 1.0
RESTART_S = 1.0
MAX_OWN_JOBS = 1 << 16


class FeedReader:
    def __init__(self, link: RedisLink, submit: Callable[[Job], Awaitable[None]]):
        """`submit` resubmits a job that Redis lost."""
        self._link = link
        self._logs = JobLogs(link, submit)
        self._loop = asyncio.get_running_loop()
        self._followers: dict[str, tuple[ref[Follower], ...]] = {}
        self._positions: dict[str, str] = {}  # feed -> last entry read
        self._has_feeds = asyncio.Event()
        self._own: OrderedDict[str, Job] = OrderedDict()
        self._accepted: set[str] = set()
        self._watched: dict[str, int] = {}  # job -> last event read
        self._has_watched = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def follow(self, job_id: str, after: int) -> Follower:
        """Follow a job's events. Raises ValueError for an invalid job id."""
        keys.events(job_id)
        follower = Follower(job_id, after, self._logs, lambda: self._accepted_job(job_id))
        is_own = job_id in self._own
        if is_own or after > 0:  # it may have missed events
            follower.catch_up()
        if not is_own:
            self._loop.call_later(ADOPT_AFTER_S, self._adopt, job_id, after)
        self._followers[job_id] = tuple(map(ref, (*self._followers_of(job_id), follower)))
        self._start()
        return follower

    def submitting(self, job: Job) -> None:
        self._positions.setdefault(keys.feed(job.feed), STREAM_START)
        self._has_feeds.set()
        self._own[job.job_id] = job
        if len(self._own) > MAX_OWN_JOBS:
            self._disown(next(iter(self._own)))
        self._start()

    def submitted(self, job_id: str) -> None:
        if job_id in self._own:
            self._accepted.add(job_id)

    def found(self, job_id: str) -> None:
        """Record that another gateway submitted the job."""
        self._disown(job_id)
        self._adopt(job_id, 0)

    def refused(self, job_id: str) -> None:
        self._disown(job_id)

    async def close(self) -> None:
        self._logs.is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._catch_up_all()

    def _start(self) -> None:
        if not self._tasks and not self._logs.is_closed:
            duties = (self._read_feeds, self._read_watched, self._sweep)
            self._tasks = [asyncio.create_task(self._keep_up(duty)) for duty in duties]

    async def _keep_up(self, duty: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await duty()
            except Exception:
                log.exception("a reader broke and starts again %s", fields(duty=duty.__name__))
                await asyncio.sleep(RESTART_S)

    async def _read_feeds(self) -> None:
        outage, is_silent = Outage("feed"), False
        while True:
            await self._has_feeds.wait()
            try:
                if (outage.is_on or is_silent) and await self._rewind_feeds():
                    self._catch_up_all()
                entries = await self._read(self._positions, FEED_BLOCK_S)
                if await self._missed_entries(entries):
                    self._catch_up_all()
            except QueueUnavailable as error:
                await asyncio.sleep(outage.failed(error))
                continue
            is_silent = not entries
            for key, of_feed in entries:
                for entry_id, batch in of_feed:
                    self._positions[key] = entry_id
                    self._dispatch(decode_events(batch, self._followers))
            if outage.over():
                self._catch_up_all()

    async def _missed_entries(self, read: list[tuple[str, list[tuple[str, bytes]]]]) -> bool:
        """Return True if a feed may be trimmed past our position: no later event reveals an ended job's gap."""
        full = [key for key, entries in read if len(entries) == PAGE_ENTRIES and self._positions[key] != STREAM_START]
        return any([await self._link.begins_after(key, self._positions[key]) for key in full])

    async def _rewind_feeds(self) -> bool:
        """Rewind feeds whose ids are below our position, after lost data or a failover; return whether any are."""
        behind = [key for key, position in self._positions.items() if await self._link.is_past_end(key, position)]
        self._positions |= dict.fromkeys(behind, STREAM_START)
        return bool(behind)

    async def _read_watched(self) -> None:
        outage = Outage("logs")
        while True:
            await self._has_watched.wait()
            jobs = {keys.events(job_id): job_id for job_id in self._watched}
            positions = {key: f"{self._watched[job_id]}-0" for key, job_id in jobs.items()}
            try:
                for key, entries in await self._read(positions, WATCH_BLOCK_S):
                    for entry_id, payload in entries:
                        if jobs[key] in self._watched:
                            self._watched[jobs[key]] = order(entry_id)[0]
                        self._dispatch(_of_log(payload))
            except QueueUnavailable as error:
                await asyncio.sleep(outage.failed(error))
                continue
            if outage.over():
                self._catch_up_all()

    async def _read(self, positions: dict[str, str], wait_s: float) -> list[tuple[str, list[tuple[str, bytes]]]]:
        at = dict(positions)
        answer = await self._link.block(lambda redis, block_ms: redis.xread(at, PAGE_ENTRIES, block_ms), wait_s)
        return [
            (key.decode(), [(entry_id.decode(), entry.get(keys.PAYLOAD, b"")) for entry_id, entry in entries])
            for key, entries in answer
        ]

    def _dispatch(self, events: Iterable[Event]) -> None:
        try:
            for event in events:
                for reference in self._followers.get(event.job_id, ()):
                    if (follower := reference()) is not None:
                        follower.on_event(event)
                if event.end is not None:
                    self._disown(event.job_id)
                    self._unwatch(event.job_id)
        except WireError as error:
            log.error("unreadable entry %s", fields(error=error))

    def _adopt(self, job_id: str, after: int) -> None:
        followers = self._followers_of(job_id)
        if job_id not in self._own and followers:
            self._watched[job_id] = min(after, self._watched.get(job_id, after))
            self._has_watched.set()
            for follower in followers:
                follower.catch_up()

    def _accepted_job(self, job_id: str) -> Job | None:
        return self._own.get(job_id) if job_id in self._accepted else None

    def _disown(self, job_id: str) -> None:
        self._own.pop(job_id, None)
        self._accepted.discard(job_id)

    def _unwatch(self, job_id: str) -> None:
        self._watched.pop(job_id, None)
        if not self._watched:
            self._has_watched.clear()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            quiet_since_s = self._loop.time() - IDLE_CHECK_S
            for job_id in list(self._followers):
                followers = self._followers_of(job_id)
                for follower in followers:
                    if follower.heard_at_s < quiet_since_s:
                        follower.catch_up()
                if not followers:
                    del self._followers[job_id]
                    self._disown(job_id)
                    self._unwatch(job_id)

    def _catch_up_all(self) -> None:
        for job_id in self._followers:
            for follower in self._followers_of(job_id):
                follower.catch_up()

    def _followers_of(self, job_id: str) -> list[Follower]:
        references = self._followers.get(job_id, ())
        return [follower for reference in references if (follower := reference()) is not None]


def _of_log(payload: bytes) -> Iterator[Event]:
    yield decode(Event, payload)

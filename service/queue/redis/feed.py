"""How a door follows its jobs: one reader of its feeds for all of them, one reader of logs for jobs of other doors."""

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
"""A job that is not submitted here by then belongs to another door."""
IDLE_CHECK_S = 5.0
SWEEP_S = 1.0
RESTART_S = 1.0
MAX_OWN_JOBS = 1 << 16


class FeedReader:
    """Hands the events of its feeds, and of the logs it watches, to whoever follows their jobs."""

    def __init__(self, link: RedisLink, submit: Callable[[Job], Awaitable[None]]):
        """`submit` writes a job again that Redis has lost before anybody took it."""
        self._link = link
        self._logs = JobLogs(link, submit)
        self._loop = asyncio.get_running_loop()
        self._followers: dict[str, tuple[ref[Follower], ...]] = {}
        self._positions: dict[str, str] = {}  # of each feed: the id of the last entry read
        self._has_feeds = asyncio.Event()
        self._own: OrderedDict[str, Job] = OrderedDict()
        self._accepted: set[str] = set()  # of our own
        self._watched: dict[str, int] = {}  # job of another door -> number of the last event read
        self._has_watched = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def follow(self, job_id: str, after: int) -> Follower:
        """Live from now on. Raises ValueError for a job id that is none."""
        keys.events(job_id)
        follower = Follower(job_id, after, self._logs, lambda: self._accepted_job(job_id))
        is_own = job_id in self._own
        if is_own or after > 0:  # its next events may have passed already
            follower.look()
        if not is_own:
            self._loop.call_later(ADOPT_AFTER_S, self._adopt, job_id, after)
        self._followers[job_id] = tuple(map(ref, (*self._followers_of(job_id), follower)))
        self._start()
        return follower

    def submitting(self, job: Job) -> None:
        """A job is about to be written whose events come through its feed."""
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
        """It was there before: its events come through another gateway's feed, or are all in its log."""
        self._disown(job_id)
        self._adopt(job_id, 0)

    def refused(self, job_id: str) -> None:
        """The queue took it not: nothing will be heard of it."""
        self._disown(job_id)

    async def close(self) -> None:
        self._logs.is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._look_all()

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
                    self._look_all()
                entries = await self._read(self._positions, FEED_BLOCK_S)
                if await self._came_too_late(entries):
                    self._look_all()
            except QueueUnavailable as error:
                await asyncio.sleep(outage.failed(error))
                continue
            is_silent = not entries
            for key, of_feed in entries:
                for entry_id, batch in of_feed:
                    self._positions[key] = entry_id
                    self._hear(decode_events(batch, self._followers))
            if outage.over():
                self._look_all()

    async def _came_too_late(self, read: list[tuple[str, list[tuple[str, bytes]]]]) -> bool:
        """Whether a feed may have been cut short behind our position before this was read of it. That takes more than a
        page. Of a job that ended there no later number tells that something is missing."""
        full = [key for key, entries in read if len(entries) == PAGE_ENTRIES and self._positions[key] != STREAM_START]
        return any([await self._link.begins_after(key, self._positions[key]) for key in full])

    async def _rewind_feeds(self) -> bool:
        """Whether one had to be: a Redis that lost its data, or another that is the primary now, may have fewer
        entries than we have read, and an earlier clock to name new ones by."""
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
                        self._hear(_of_log(payload))
            except QueueUnavailable as error:
                await asyncio.sleep(outage.failed(error))
                continue
            if outage.over():
                self._look_all()

    async def _read(self, positions: dict[str, str], wait_s: float) -> list[tuple[str, list[tuple[str, bytes]]]]:
        """Key -> entries behind the given positions, each with its payload."""
        at = dict(positions)
        answer = await self._link.block(lambda redis, block_ms: redis.xread(at, PAGE_ENTRIES, block_ms), wait_s)
        return [
            (key.decode(), [(entry_id.decode(), entry.get(keys.PAYLOAD, b"")) for entry_id, entry in entries])
            for key, entries in answer
        ]

    def _hear(self, events: Iterable[Event]) -> None:
        try:
            for event in events:
                for reference in self._followers.get(event.job_id, ()):
                    if (follower := reference()) is not None:
                        follower.hear(event)
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
                follower.look()

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
                        follower.look()
                if not followers:
                    del self._followers[job_id]
                    self._disown(job_id)
                    self._unwatch(job_id)

    def _look_all(self) -> None:
        for job_id in self._followers:
            for follower in self._followers_of(job_id):
                follower.look()

    def _followers_of(self, job_id: str) -> list[Follower]:
        """Those that somebody still holds."""
        references = self._followers.get(job_id, ())
        return [follower for reference in references if (follower := reference()) is not None]


def _of_log(payload: bytes) -> Iterator[Event]:
    """A log's entry is one event, where a feed's is a list."""
    yield decode(Event, payload)

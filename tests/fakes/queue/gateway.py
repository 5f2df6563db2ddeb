"""The gateways' end of the queue in memory, the reference of the queue on Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from service.queue import keys
from service.queue.interface import (
    UNBOUNDED,
    Backlog,
    Bounds,
    IngressEntry,
    QueueState,
    QueueUnavailable,
    ReplyStream,
    Standing,
)
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.records import UNLIMITED, StorageLimits
from tests.fakes.queue.adapters import MemoryAdapterStore
from tests.fakes.queue.batches import MemoryBatchStore
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.queue.requests import MemoryRequestStore
from tests.fakes.queue.responses import MemoryResponseStore
from tests.fakes.queue.steady_time import unix_s


class MemoryIngress:
    """Implements IngressQueue."""

    def __init__(self, data: QueueData) -> None:
        self.data = data
        self._entries: set[IngressEntry] = set()  # fetched and not settled

    async def fetch_entries(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        streams = [self.data.ingress_of(producer) for producer in producers]
        await self.data.wait_until(lambda: any(streams), wait_s)
        entries = [stream.popleft() for stream in streams for _ in range(min(len(stream), max_entries))]
        self._entries.update(entries)
        return entries

    async def renew_entries(self) -> Sequence[IngressEntry]:
        return []

    async def begin_replies(self, entry: IngressEntry, reply_id: str) -> ReplyStream:
        keys.reply(entry.producer, reply_id)
        if entry not in self._entries:
            return ReplyStream(Standing.TAKEN)
        name = (entry.producer, reply_id)
        first = self.data.reply_owners.get(name, entry)
        if first.entry_id != entry.entry_id:
            if first.payload == entry.payload:
                return ReplyStream(Standing.REPEATED)
            if name not in self.data.replies_done:
                return ReplyStream(Standing.IN_USE)
            self.data.replies_done.remove(name)
            del self.data.replies[name]
        self.data.reply_owners[name] = entry
        return ReplyStream(Standing.OURS, self.data.replies_of(entry.producer, reply_id))

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        name = (entry.producer, reply_id)
        keys.reply(*name)
        if name not in self.data.replies_done:
            if entry not in self._entries or self.data.reply_owners.get(name, entry).entry_id != entry.entry_id:
                return False
            self.data.write_reply(name, number, payload)
            if is_last:
                self.data.replies_done.add(name)
        return True

    async def settle_entry(self, entry: IngressEntry) -> None:
        self._entries.discard(entry)

    def release_entry(self, entry: IngressEntry) -> None:
        if entry in self._entries:
            self._entries.remove(entry)
            left = replace(entry, was_left=True)
            asyncio.get_running_loop().call_later(keys.INGRESS_LEFT_S, self.data.give_entry, left)


class MemoryEvents:
    """Implements EventStream."""

    def __init__(self, data: QueueData, job_id: str, after: int, check_open: Callable[[], None]) -> None:
        self._data = data
        self._job_id = job_id
        self._number = after
        self._check_open = check_open
        self._is_closed = False

    def __aiter__(self) -> MemoryEvents:
        return self

    async def __anext__(self) -> Event:
        while not self._is_closed:
            log = self._data.logs.get(self._job_id)
            if log is not None and len(log.events) > self._number:
                self._number += 1
                return log.events[self._number - 1]
            if log is not None and log.ended_at_s is not None:
                break
            self._check_open()
            await self._data.news.wait()
        raise StopAsyncIteration

    def take_arrived(self) -> Sequence[Event]:
        log = self._data.logs.get(self._job_id)
        arrived = [] if log is None else log.events[self._number :]
        self._number += len(arrived)
        return arrived

    async def aclose(self) -> None:
        self._is_closed = True


class MemoryGatewayQueue:
    """Implements GatewayQueue, for gateways and workers on one event loop that share `data`."""

    def __init__(self, data: QueueData | None = None) -> None:
        self.data = QueueData() if data is None else data
        self.batches = MemoryBatchStore(self.data.batch_data)
        self.adapters = MemoryAdapterStore(self.data.adapters)
        self.responses = MemoryResponseStore(self.data.responses, self.data.batch_data.ledger)
        self.requests = MemoryRequestStore(self.data)
        self.ingress = MemoryIngress(self.data)
        self._is_closed = False

    async def submit(
        self,
        job: Job,
        bounds: Bounds = UNBOUNDED,
        record: RequestRecord | None = None,
        limits: StorageLimits = UNLIMITED,
    ) -> None:
        self._check_open()
        keep_record = None if record is None else partial(self.data.requests.put_submitted, record, limits)
        self.data.submit(job, bounds, keep_record)

    async def backlog(self, tenant: str) -> Backlog:
        return self.data.backlog(tenant)

    async def queue_position(self, job_id: str) -> int | None:
        return self.data.queue_position(job_id)

    def follow(self, job_id: str, after: int = 0) -> MemoryEvents:
        keys.events(job_id)
        return MemoryEvents(self.data, job_id, after, self._check_open)

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        logs = [self.data.logs.get(job_id) for job_id in job_ids]
        return [log.events[-1] if log is not None and log.events else None for log in logs]

    async def cancel(self, cancel: Cancel) -> None:
        self._check_open()
        self.data.cancel(cancel)

    async def workers(self) -> Sequence[WorkerCard]:
        return self.data.fresh_cards()

    async def request_block_maps(self) -> None:
        self._check_open()
        self.data.looked_at_until_s = time.monotonic() + keys.LOOKED_AT_TTL_S

    async def queue_state(self) -> QueueState:
        return self.data.state()

    async def now_s(self) -> float:
        return unix_s()

    async def close(self) -> None:
        self._is_closed = True
        self.data.wake_waiters()

    async def produce(self, producer: str, payload: bytes, was_left: bool = False) -> None:
        """Write an entry as a foreign producer does. `was_left`: a gateway has had it."""
        self.data.produce(producer, payload, was_left)

    def replies(self, producer: str, producer_job_id: str) -> Sequence[bytes]:
        """Return the replies to a job so far, as its producer reads them."""
        return self.data.replies_of(producer, producer_job_id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise QueueUnavailable("the queue was closed")

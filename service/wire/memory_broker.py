"""The broker for one process: the contract without Redis. Nothing outlives the process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from service.errors import EndReason
from service.wire import keys
from service.wire.broker import BrokerUnavailable, Claim, IngressEntry
from service.wire.memory_requests import MemoryRequests
from service.wire.messages import Cancel, Event, Job, RequestRecord, Usage, WorkerCard


@dataclass
class _Log:
    """The events of one job; event n is at n - 1."""

    events: list[Event] = field(default_factory=list)
    ended_at_s: float | None = None


class MemoryBroker:
    """Implements DoorBroker and WorkerBroker, for doors and workers on one event loop."""

    def __init__(self):
        self._news = asyncio.Event()
        self._queue: deque[tuple[str, Job]] = deque()
        self._claimed: dict[str, str] = {}  # job -> entry
        self._logs: dict[str, _Log] = {}
        self._tombstones: dict[str, EndReason] = {}
        self._cancels: list[Cancel] = []
        self._cards: dict[str, WorkerCard] = {}
        self._looked_at_until_s = 0.0
        self._ingress: dict[str, deque[IngressEntry]] = {}
        self._replies: dict[tuple[str, str], list[bytes]] = {}
        self._num_entries = 0
        self._is_closed = False
        self._requests = MemoryRequests()

    async def submit(self, job: Job) -> None:
        self._check_open()
        self._forget_old()
        self._queue.append((self._next_entry_id(), job))
        self._tell()

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        keys.events(job_id)
        return self._follow(job_id, after)

    async def cancel(self, cancel: Cancel) -> None:
        self._check_open()
        log = self._logs.get(cancel.job_id)
        if log is not None and log.ended_at_s is not None:
            return
        self._tombstones.setdefault(cancel.job_id, cancel.reason)
        self._cancels.append(cancel)
        self._tell()

    async def workers(self) -> Sequence[WorkerCard]:
        fresh_since_s = time.time() - keys.CARD_TTL_S
        return [card for card in self._cards.values() if card.beat_at_s >= fresh_since_s]

    async def look(self) -> None:
        self._check_open()
        self._looked_at_until_s = time.monotonic() + keys.LOOKED_AT_TTL_S

    async def num_waiting(self) -> int:
        return len(self._queue)

    async def now_s(self) -> float:
        return time.time()

    async def fetch_ingress(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        streams = [self._ingress.setdefault(keys.ingress(producer), deque()) for producer in producers]
        await self._wait(lambda: any(streams), wait_s)
        return [stream.popleft() for stream in streams for _ in range(min(len(stream), max_entries))]

    async def settle_ingress(self, entry: IngressEntry) -> None:
        self._check_open()

    async def reply(self, producer: str, producer_job_id: str, payload: bytes) -> None:
        self._check_open()
        keys.reply(producer, producer_job_id)
        self._replies.setdefault((producer, producer_job_id), []).append(payload)

    async def remember(self, record: RequestRecord, idempotency: str | None = None) -> str:
        self._check_open()
        return self._requests.remember(record, idempotency)

    async def recall(self, request_id: str) -> RequestRecord | None:
        keys.request(request_id)
        return self._requests.recall(request_id)

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        logs = [self._logs.get(job_id) for job_id in job_ids]
        return [log.events[-1] if log is not None and log.events else None for log in logs]

    async def watch(self, request_id: str, for_s: float) -> None:
        self._check_open()
        self._requests.watch(request_id, for_s)

    async def is_watched(self, request_id: str) -> bool:
        return self._requests.is_watched(request_id)

    async def produce(self, producer: str, payload: bytes) -> None:
        """What a foreign producer does: put an entry on its ingress stream."""
        entry = IngressEntry(producer, self._next_entry_id(), payload)
        self._ingress.setdefault(keys.ingress(producer), deque()).append(entry)
        self._tell()

    def replies(self, producer: str, producer_job_id: str) -> Sequence[bytes]:
        """What a foreign producer reads: the replies to its job so far."""
        return tuple(self._replies.get((producer, producer_job_id), ()))

    async def fetch(self, max_jobs: int, wait_s: float) -> Sequence[Claim]:
        give_up_s = time.monotonic() + wait_s
        while True:
            await self._wait(lambda: self._queue, give_up_s - time.monotonic())
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), max_jobs))]
            claims = []
            for entry_id, job in taken:
                self._claimed[job.job_id] = entry_id
                reason = self._tombstones.get(job.job_id)
                if reason is None and job.deadline_s is not None and job.deadline_s <= time.time():
                    reason = EndReason.DEADLINE
                if reason is None:
                    claims.append(Claim(job, 1, entry_id))
                else:
                    usage = Usage(prompt_tokens=0, completion_tokens=0)
                    await self.publish([Event(job_id=job.job_id, number=1, end=reason, usage=usage)])
            if claims or time.monotonic() >= give_up_s:
                return claims

    async def publish(self, events: Sequence[Event]) -> None:
        self._check_open()
        for event in events:
            if event.job_id in self._claimed:
                self._write(event)
        self._tell()

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        await self._wait(lambda: self._cancels, wait_s)
        cancels, self._cancels = self._cancels, []
        return cancels

    async def announce(self, card: WorkerCard) -> bool:
        self._check_open()
        self._cards[card.worker_id] = replace(card, beat_at_s=time.time())
        return time.monotonic() < self._looked_at_until_s

    async def retire(self, worker_id: str) -> None:
        self._cards.pop(worker_id, None)

    async def close(self) -> None:
        self._is_closed = True
        self._tell()

    def _write(self, event: Event) -> None:
        log = self._logs.setdefault(event.job_id, _Log())
        if event.number == len(log.events) + 1:
            log.events.append(event)
        if event.end is not None:
            log.ended_at_s = time.monotonic()
            self._claimed.pop(event.job_id, None)
            self._tombstones.pop(event.job_id, None)

    async def _follow(self, job_id: str, after: int) -> AsyncIterator[Event]:
        number = after
        while True:
            log = self._logs.get(job_id)
            if log is not None and len(log.events) > number:
                number += 1
                yield log.events[number - 1]
            elif log is not None and log.ended_at_s is not None:
                return
            else:
                self._check_open()
                await self._news.wait()

    async def _wait(self, there: Callable[[], object], wait_s: float) -> None:
        """Until something is there, wait_s at most."""
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while not there():
                    self._check_open()
                    await self._news.wait()
        except TimeoutError:
            return

    def _forget_old(self) -> None:
        """Logs live a while after the end, as they do in Redis."""
        old_s = time.monotonic() - keys.LOG_ENDED_TTL_S
        for job_id in [job_id for job_id, log in self._logs.items() if log.ended_at_s and log.ended_at_s < old_s]:
            del self._logs[job_id]

    def _next_entry_id(self) -> str:
        self._num_entries += 1
        return f"{self._num_entries}-0"

    def _tell(self) -> None:
        """Wake who waits; who looks now and finds nothing waits for the next time."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BrokerUnavailable("the broker was closed")

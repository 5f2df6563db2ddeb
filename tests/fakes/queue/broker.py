"""The queue without Redis: the same promises inside one process, for `tests` and for a gateway and worker in one.

It keeps messages as they are, so it is also the plain statement of what the Redis broker does. Nothing outlives the
process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from service.queue import keys
from service.queue.interface import (
    ANY_ROOM,
    UNBOUNDED,
    Backlog,
    Bounds,
    BrokerUnavailable,
    Claim,
    IngressEntry,
    Lease,
    QueueState,
    ReplyStream,
    Room,
    Standing,
)
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.steady_time import unix_s
from service.queue.storage import UNLIMITED, StorageLimits
from tests.fakes.queue.batches import MemoryBatches
from tests.fakes.queue.queue import MemoryQueue
from tests.fakes.queue.responses import MemoryResponses

LEASE_S = 10.0
_NAMES = (f"memory-{number}" for number in itertools.count(1))


class MemoryBroker(MemoryBatches, MemoryResponses):
    """Implements DoorBroker and WorkerBroker, for doors and workers on one event loop. Brokers that are to meet share
    a `queue`; each is a worker of its own."""

    def __init__(self, queue: MemoryQueue | None = None, name: str | None = None, lease_s: float = LEASE_S):
        self.queue = MemoryQueue() if queue is None else queue
        MemoryBatches.__init__(self, self.queue.shelf)
        MemoryResponses.__init__(self, self.queue.responses, self.queue.shelf.ledger)
        self.lease_s = lease_s
        self._owner = name or next(_NAMES)
        self._held: dict[str, int] = {}  # job -> attempt
        self._num_cancels_read = len(self.queue.cancels)
        self._may_have_predecessor = True
        self._ingress: set[IngressEntry] = set()  # fetched and not settled
        self._is_closed = False

    async def submit(
        self,
        job: Job,
        bounds: Bounds = UNBOUNDED,
        record: RequestRecord | None = None,
        limits: StorageLimits = UNLIMITED,
    ) -> None:
        self._check_open()
        keep_record = None if record is None else partial(self.queue.requests.remember_submitted, record, limits)
        self.queue.submit(job, bounds, keep_record)

    async def backlog(self, tenant: str) -> Backlog:
        return self.queue.backlog(tenant)

    async def place(self, job_id: str) -> int | None:
        return self.queue.place(job_id)

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        keys.events(job_id)
        return self._follow(job_id, after)

    async def cancel(self, cancel: Cancel) -> None:
        self._check_open()
        self.queue.cancel(cancel)

    async def workers(self) -> Sequence[WorkerCard]:
        fresh_since_s = unix_s() - keys.CARD_TTL_S
        return [card for card in self.queue.cards.values() if card.beat_at_s >= fresh_since_s]

    async def look(self) -> None:
        self._check_open()
        self.queue.looked_at_until_s = time.monotonic() + keys.LOOKED_AT_TTL_S

    async def queue_state(self) -> QueueState:
        return self.queue.state()

    async def now_s(self) -> float:
        return unix_s()

    async def fetch_ingress(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        streams = [self.queue.ingress_of(producer) for producer in producers]
        await self._wait(lambda: any(streams), wait_s)
        entries = [stream.popleft() for stream in streams for _ in range(min(len(stream), max_entries))]
        self._ingress.update(entries)
        return entries

    async def keep_ingress(self) -> Sequence[IngressEntry]:
        self._check_open()
        return []

    async def begin_replies(self, entry: IngressEntry, reply_id: str) -> ReplyStream:
        self._check_open()
        keys.reply(entry.producer, reply_id)
        if entry not in self._ingress:
            return ReplyStream(Standing.TAKEN)
        name = (entry.producer, reply_id)
        first = self.queue.reply_owners.get(name, entry)
        if first.entry_id != entry.entry_id:
            if first.payload == entry.payload:
                return ReplyStream(Standing.REPEATED)
            if name not in self.queue.replies_done:
                return ReplyStream(Standing.IN_USE)
            self.queue.replies_done.remove(name)
            del self.queue.replies[name]
        self.queue.reply_owners[name] = entry
        return ReplyStream(Standing.OURS, self.replies(entry.producer, reply_id))

    async def settle_ingress(self, entry: IngressEntry) -> None:
        self._check_open()
        self._ingress.discard(entry)

    def leave_ingress(self, entry: IngressEntry) -> None:
        if entry in self._ingress:
            self._ingress.remove(entry)
            left = replace(entry, was_left=True)
            asyncio.get_running_loop().call_later(keys.INGRESS_LEFT_S, self.queue.give_entry, left)

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        self._check_open()
        name = (entry.producer, reply_id)
        keys.reply(*name)
        if name not in self.queue.replies_done:
            if entry not in self._ingress or self.queue.reply_owners.get(name, entry).entry_id != entry.entry_id:
                return False
            self.queue.write_reply(name, number, payload)
            if is_last:
                self.queue.replies_done.add(name)
        return True

    async def remember(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        self._check_open()
        return self.queue.requests.remember(record, idempotency, limits)

    async def recall(self, request_id: str) -> RequestRecord | None:
        keys.request(request_id)
        return self.queue.requests.recall(request_id)

    async def forget(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        if unless_there is None or not self.queue.has(unless_there):
            self.queue.requests.forget(request_id, tenant, idempotency)

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        logs = [self.queue.logs.get(job_id) for job_id in job_ids]
        return [log.events[-1] if log is not None and log.events else None for log in logs]

    async def watch(self, request_id: str, for_s: float) -> None:
        self._check_open()
        self.queue.requests.watch(request_id, for_s)

    async def is_watched(self, request_id: str) -> bool:
        return self.queue.requests.is_watched(request_id)

    async def produce(self, producer: str, payload: bytes, was_left: bool = False) -> None:
        """What a foreign producer does: put an entry on its ingress stream. `was_left`: a gateway has had it."""
        self.queue.produce(producer, payload, was_left)

    def replies(self, producer: str, producer_job_id: str) -> Sequence[bytes]:
        """What a foreign producer reads: the replies to its job so far."""
        return tuple(self.queue.replies.get((producer, producer_job_id), ()))

    async def fetch(self, max_branches: int, wait_s: float, room: Room = ANY_ROOM) -> Sequence[Claim]:
        give_up_s = time.monotonic() + wait_s
        self._may_have_predecessor = False
        while True:
            self._check_open()
            self.queue.start_lease(self._owner, self.lease_s)
            claims = self.queue.claim(self._owner, max_branches, room)
            self._held |= {claim.job.job_id: claim.attempt for claim in claims}
            left_s = give_up_s - time.monotonic()
            if claims or left_s <= 0:
                return claims
            num_known = self.queue.num_claimable if room.is_scarce(max_branches) else 0
            await self._wait(lambda known=num_known: self.queue.num_claimable > known, left_s)

    async def fetch_suspect(self) -> Claim | None:
        self.queue.start_lease(self._owner, self.lease_s)
        claim = self.queue.claim_suspect(self._owner)
        if claim is not None:
            self._held[claim.job.job_id] = claim.attempt
        return claim

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        self._check_open()
        lost = set()
        for event in events:
            attempt = self._held.get(event.job_id)
            if attempt is None or not self.queue.write(event, self._owner, attempt):
                self._held.pop(event.job_id, None)
                lost.add(event.job_id)
            elif event.end is not None:
                self._held.pop(event.job_id)
        self.queue.tell()
        return frozenset(lost)

    async def renew(self) -> Lease:
        self._check_open()
        self.queue.renew_lease(self._owner, self.lease_s)
        lost = {job_id for job_id, attempt in self._held.items() if not self.queue.holds(job_id, self._owner, attempt)}
        for job_id in lost:
            del self._held[job_id]
        return Lease(frozenset(lost), self.queue.runs_suspects(self._owner))

    async def take_over(self) -> int:
        self._check_open()
        predecessor, self._may_have_predecessor = self._may_have_predecessor, False
        return self.queue.take_over(self._owner, predecessor)

    async def hand_back(self, job_ids: Collection[str], cause: str | None = None) -> None:
        self._check_open()
        if cause is not None:
            self.queue.count_death()
        for job_id in job_ids:
            attempt = self._held.pop(job_id, None)
            if attempt is not None and self.queue.holds(job_id, self._owner, attempt):
                self.queue.put_back(job_id, cause)
        self.queue.tell()

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        await self._wait(lambda: len(self.queue.cancels) > self._num_cancels_read, wait_s)
        cancels = self.queue.cancels[self._num_cancels_read :]
        self._num_cancels_read = len(self.queue.cancels)
        return cancels

    async def announce(self, card: WorkerCard) -> bool:
        self._check_open()
        self.queue.cards[card.worker_id] = replace(card, beat_at_s=unix_s())
        return time.monotonic() < self.queue.looked_at_until_s

    async def retire(self, worker_id: str) -> None:
        self.queue.cards.pop(worker_id, None)
        if not self._held:
            self.queue.end_lease(self._owner)

    async def close(self) -> None:
        self._is_closed = True
        self.queue.tell()

    async def _follow(self, job_id: str, after: int) -> AsyncIterator[Event]:
        number = after
        while True:
            log = self.queue.logs.get(job_id)
            if log is not None and len(log.events) > number:
                number += 1
                yield log.events[number - 1]
            elif log is not None and log.ended_at_s is not None:
                return
            else:
                self._check_open()
                await self.queue.news.wait()

    async def _wait(self, there: Callable[[], object], wait_s: float) -> None:
        """Until something is there, wait_s at most."""
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while not there():
                    self._check_open()
                    await self.queue.news.wait()
        except TimeoutError:
            return

    def _check_open(self) -> None:
        if self._is_closed:
            raise BrokerUnavailable("the broker was closed")

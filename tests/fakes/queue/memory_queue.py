"""The queue without Redis: the same promises inside one process, for `tests` and for a gateway and worker in one.

It keeps messages as they are, so it is also the plain statement of what the Redis queue does. Nothing outlives the
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
    UNBOUNDED,
    UNLIMITED_BUDGET,
    Backlog,
    Bounds,
    Claim,
    ClaimBudget,
    IngressEntry,
    Lease,
    QueueState,
    QueueUnavailable,
    ReplyStream,
    Standing,
)
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.steady_time import unix_s
from service.queue.storage import UNLIMITED, StorageLimits
from tests.fakes.queue.batches import MemoryBatches
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.queue.responses import MemoryResponses

LEASE_S = 10.0
_NAMES = (f"memory-{number}" for number in itertools.count(1))


class MemoryQueue(MemoryBatches, MemoryResponses):
    """Implements GatewayQueue and WorkerQueue, for doors and workers on one event loop. Queues that are to meet share
    a `queue`; each is a worker of its own."""

    def __init__(self, data: QueueData | None = None, name: str | None = None, lease_s: float = LEASE_S):
        self.data = QueueData() if data is None else data
        MemoryBatches.__init__(self, self.data.batch_data)
        MemoryResponses.__init__(self, self.data.responses, self.data.batch_data.ledger)
        self.lease_s = lease_s
        self._owner = name or next(_NAMES)
        self._held: dict[str, int] = {}  # job -> attempt
        self._num_cancels_read = len(self.data.cancels)
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
        keep_record = None if record is None else partial(self.data.requests.remember_submitted, record, limits)
        self.data.submit(job, bounds, keep_record)

    async def backlog(self, tenant: str) -> Backlog:
        return self.data.backlog(tenant)

    async def place(self, job_id: str) -> int | None:
        return self.data.place(job_id)

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        keys.events(job_id)
        return self._follow(job_id, after)

    async def cancel(self, cancel: Cancel) -> None:
        self._check_open()
        self.data.cancel(cancel)

    async def workers(self) -> Sequence[WorkerCard]:
        fresh_since_s = unix_s() - keys.CARD_TTL_S
        return [card for card in self.data.cards.values() if card.beat_at_s >= fresh_since_s]

    async def look(self) -> None:
        self._check_open()
        self.data.looked_at_until_s = time.monotonic() + keys.LOOKED_AT_TTL_S

    async def queue_state(self) -> QueueState:
        return self.data.state()

    async def now_s(self) -> float:
        return unix_s()

    async def fetch_ingress(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        streams = [self.data.ingress_of(producer) for producer in producers]
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
        first = self.data.reply_owners.get(name, entry)
        if first.entry_id != entry.entry_id:
            if first.payload == entry.payload:
                return ReplyStream(Standing.REPEATED)
            if name not in self.data.replies_done:
                return ReplyStream(Standing.IN_USE)
            self.data.replies_done.remove(name)
            del self.data.replies[name]
        self.data.reply_owners[name] = entry
        return ReplyStream(Standing.OURS, self.replies(entry.producer, reply_id))

    async def settle_ingress(self, entry: IngressEntry) -> None:
        self._check_open()
        self._ingress.discard(entry)

    def leave_ingress(self, entry: IngressEntry) -> None:
        if entry in self._ingress:
            self._ingress.remove(entry)
            left = replace(entry, was_left=True)
            asyncio.get_running_loop().call_later(keys.INGRESS_LEFT_S, self.data.give_entry, left)

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        self._check_open()
        name = (entry.producer, reply_id)
        keys.reply(*name)
        if name not in self.data.replies_done:
            if entry not in self._ingress or self.data.reply_owners.get(name, entry).entry_id != entry.entry_id:
                return False
            self.data.write_reply(name, number, payload)
            if is_last:
                self.data.replies_done.add(name)
        return True

    async def remember(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        self._check_open()
        return self.data.requests.remember(record, idempotency, limits)

    async def recall(self, request_id: str) -> RequestRecord | None:
        keys.request(request_id)
        return self.data.requests.recall(request_id)

    async def forget(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        if unless_there is None or not self.data.has(unless_there):
            self.data.requests.forget(request_id, tenant, idempotency)

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        logs = [self.data.logs.get(job_id) for job_id in job_ids]
        return [log.events[-1] if log is not None and log.events else None for log in logs]

    async def watch(self, request_id: str, for_s: float) -> None:
        self._check_open()
        self.data.requests.watch(request_id, for_s)

    async def is_watched(self, request_id: str) -> bool:
        return self.data.requests.is_watched(request_id)

    async def produce(self, producer: str, payload: bytes, was_left: bool = False) -> None:
        """What a foreign producer does: put an entry on its ingress stream. `was_left`: a gateway has had it."""
        self.data.produce(producer, payload, was_left)

    def replies(self, producer: str, producer_job_id: str) -> Sequence[bytes]:
        """What a foreign producer reads: the replies to its job so far."""
        return tuple(self.data.replies.get((producer, producer_job_id), ()))

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget = UNLIMITED_BUDGET) -> Sequence[Claim]:
        give_up_s = time.monotonic() + wait_s
        self._may_have_predecessor = False
        while True:
            self._check_open()
            self.data.start_lease(self._owner, self.lease_s)
            claims = self.data.claim(self._owner, max_branches, budget)
            self._held |= {claim.job.job_id: claim.attempt for claim in claims}
            left_s = give_up_s - time.monotonic()
            if claims or left_s <= 0:
                return claims
            num_known = self.data.num_claimable if budget.is_restricted(max_branches) else 0
            await self._wait(lambda known=num_known: self.data.num_claimable > known, left_s)

    async def fetch_suspect(self) -> Claim | None:
        self.data.start_lease(self._owner, self.lease_s)
        claim = self.data.claim_suspect(self._owner)
        if claim is not None:
            self._held[claim.job.job_id] = claim.attempt
        return claim

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        self._check_open()
        lost = set()
        for event in events:
            attempt = self._held.get(event.job_id)
            if attempt is None or not self.data.write(event, self._owner, attempt):
                self._held.pop(event.job_id, None)
                lost.add(event.job_id)
            elif event.end is not None:
                self._held.pop(event.job_id)
        self.data.tell()
        return frozenset(lost)

    async def renew(self) -> Lease:
        self._check_open()
        self.data.renew_lease(self._owner, self.lease_s)
        lost = {job_id for job_id, attempt in self._held.items() if not self.data.holds(job_id, self._owner, attempt)}
        for job_id in lost:
            del self._held[job_id]
        return Lease(frozenset(lost), self.data.runs_suspects(self._owner))

    async def take_over(self) -> int:
        self._check_open()
        predecessor, self._may_have_predecessor = self._may_have_predecessor, False
        return self.data.take_over(self._owner, predecessor)

    async def hand_back(self, job_ids: Collection[str], cause: str | None = None) -> None:
        self._check_open()
        if cause is not None:
            self.data.count_death()
        for job_id in job_ids:
            attempt = self._held.pop(job_id, None)
            if attempt is not None and self.data.holds(job_id, self._owner, attempt):
                self.data.put_back(job_id, cause)
        self.data.tell()

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        await self._wait(lambda: len(self.data.cancels) > self._num_cancels_read, wait_s)
        cancels = self.data.cancels[self._num_cancels_read :]
        self._num_cancels_read = len(self.data.cancels)
        return cancels

    async def announce(self, card: WorkerCard) -> bool:
        self._check_open()
        self.data.cards[card.worker_id] = replace(card, beat_at_s=unix_s())
        return time.monotonic() < self.data.looked_at_until_s

    async def retire(self, worker_id: str) -> None:
        self.data.cards.pop(worker_id, None)
        if not self._held:
            self.data.end_lease(self._owner)

    async def close(self) -> None:
        self._is_closed = True
        self.data.tell()

    async def _follow(self, job_id: str, after: int) -> AsyncIterator[Event]:
        number = after
        while True:
            log = self.data.logs.get(job_id)
            if log is not None and len(log.events) > number:
                number += 1
                yield log.events[number - 1]
            elif log is not None and log.ended_at_s is not None:
                return
            else:
                self._check_open()
                await self.data.news.wait()

    async def _wait(self, there: Callable[[], object], wait_s: float) -> None:
        """Until something is there, wait_s at most."""
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while not there():
                    self._check_open()
                    await self.data.news.wait()
        except TimeoutError:
            return

    def _check_open(self) -> None:
        if self._is_closed:
            raise QueueUnavailable("the queue was closed")

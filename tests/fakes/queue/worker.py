"""The workers' end of the queue in memory, the reference of the queue on Redis."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from service.queue.interface import UNLIMITED_BUDGET, Claim, ClaimBudget, Lease, QueueUnavailable
from service.queue.messages import Cancel, Event, WorkerCard
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.queue.steady_time import unix_s

LEASE_S = 10.0
_NAMES = (f"memory-{number}" for number in itertools.count(1))


class MemoryWorkerQueue:
    """Implements WorkerQueue, for gateways and workers on one event loop that share `data`. Leaves no job to a better
    worker (`ClaimBudget.num_held`)."""

    def __init__(self, data: QueueData | None = None, name: str | None = None, lease_s: float = LEASE_S) -> None:
        self.data = QueueData() if data is None else data
        self.lease_s = lease_s
        self._owner = name or next(_NAMES)
        self._claimed: dict[str, int] = {}  # job -> attempt
        self._num_cancels_read = len(self.data.cancels)
        self._may_have_predecessor = True
        self._is_fetching_over = False
        self._is_closed = False

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget = UNLIMITED_BUDGET) -> Sequence[Claim]:
        give_up_s = time.monotonic() + wait_s
        self._may_have_predecessor = False
        while not self._is_fetching_over:
            self._check_open()
            self.data.start_lease(self._owner, self.lease_s)
            claims = self.data.claim(self._owner, max_branches, budget)
            self._claimed |= {claim.job.job_id: claim.attempt for claim in claims}
            left_s = give_up_s - time.monotonic()
            if claims or left_s <= 0:
                return claims
            num_known = self.data.num_claimable if budget.is_restricted(max_branches) else 0
            await self.data.wait_until(
                lambda known=num_known: self._is_closed or self.data.num_claimable > known, left_s
            )
        return ()

    async def fetch_suspect(self) -> Claim | None:
        self.data.start_lease(self._owner, self.lease_s)
        claim = self.data.claim_suspect(self._owner)
        if claim is not None:
            self._claimed[claim.job.job_id] = claim.attempt
        return claim

    def stop_fetching(self) -> None:
        self._is_fetching_over = True

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        self._check_open()
        lost = set()
        for event in events:
            attempt = self._claimed.get(event.job_id)
            if attempt is None or not self.data.write(event, self._owner, attempt):
                self._claimed.pop(event.job_id, None)
                lost.add(event.job_id)
            elif event.end is not None:
                self._claimed.pop(event.job_id)
        self.data.wake_waiters()
        return frozenset(lost)

    async def renew(self) -> Lease:
        self._check_open()
        self.data.renew_lease(self._owner, self.lease_s)
        lost = {job_id for job_id, attempt in self._claimed.items() if not self.data.owns(job_id, self._owner, attempt)}
        for job_id in lost:
            del self._claimed[job_id]
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
            attempt = self._claimed.pop(job_id, None)
            if attempt is not None and self.data.owns(job_id, self._owner, attempt):
                self.data.put_back(job_id, cause)
        self.data.wake_waiters()

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        def has_news() -> bool:
            return self._is_closed or len(self.data.cancels) > self._num_cancels_read

        await self.data.wait_until(has_news, wait_s)
        self._check_open()
        cancels = self.data.cancels[self._num_cancels_read :]
        self._num_cancels_read = len(self.data.cancels)
        return cancels

    async def now_s(self) -> float:
        return unix_s()

    async def announce(self, card: WorkerCard) -> bool:
        self._check_open()
        self.data.cards[card.worker_id] = replace(card, beat_at_s=unix_s())
        return time.monotonic() < self.data.looked_at_until_s

    async def workers(self) -> Sequence[WorkerCard]:
        return self.data.fresh_cards()

    async def retire(self, worker_id: str) -> None:
        self.data.cards.pop(worker_id, None)
        if not self._claimed:
            self.data.end_lease(self._owner)

    async def close(self) -> None:
        self._is_closed = True
        self.data.wake_waiters()

    def _check_open(self) -> None:
        if self._is_closed:
            raise QueueUnavailable("the queue was closed")

"""Claim budget of a worker: the work its engine can start.

Holdings over a share can be reclaimed, so jobs may be claimed even without a free slot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from service.fair_share import fair_share
from service.queue.interface import ClaimBudget
from service.queue.job_cost import branches_of
from service.queue.messages import Job

RESERVED_DIVISOR = 16
"""Reserve with several tenants: 1/16 of the slots, for tenants below their share."""
RECENT_S = 30.0
"""Time for which a tenant counts after its last job."""
OVER_CLAIM_DIVISOR = 32
"""Over-claim one job per 32 slots, so that a finished sequence is replaced in the next step."""


@dataclass
class _HeldJob:
    tenant: str
    num_branches: int
    num_tokens: int  # 0 once started


class SlotCapacity:
    """Slots and tokens of one engine. Times are monotonic seconds."""

    def __init__(self, num_slots: int, num_cache_tokens: int):
        self._num_slots = num_slots
        self._num_cache_tokens = num_cache_tokens
        self._num_over_claimed = max(1, num_slots // OVER_CLAIM_DIVISOR)
        self._held: dict[str, _HeldJob] = {}
        self._num_branches = self._num_tokens = 0
        self._branches_by_tenant: Counter[str] = Counter()
        self._seen_at_s: OrderedDict[str, float] = OrderedDict()

    def add_job(self, job: Job, num_sent_tokens: int, now_s: float) -> None:
        """Count a job, once. `num_sent_tokens`: sent under earlier claims."""
        self.remove_job(job.job_id, now_s)
        num_tokens = len(job.prompt) // 4 + num_sent_tokens
        self._held[job.job_id] = held = _HeldJob(job.tenant, branches_of(job), num_tokens)
        self._num_branches += held.num_branches
        self._num_tokens += held.num_tokens
        self._branches_by_tenant[held.tenant] += held.num_branches
        self._mark_seen(held.tenant, now_s)

    def mark_started(self, job_id: str) -> None:
        """Stop counting the job's tokens, as its blocks are allocated."""
        held = self._held.get(job_id)
        if held is not None and held.num_tokens:
            self._num_tokens -= held.num_tokens
            held.num_tokens = 0

    def remove_job(self, job_id: str, now_s: float) -> None:
        self.mark_started(job_id)
        held = self._held.pop(job_id, None)
        if held is None:
            return
        self._num_branches -= held.num_branches
        self._branches_by_tenant[held.tenant] -= held.num_branches
        if not self._branches_by_tenant[held.tenant]:
            del self._branches_by_tenant[held.tenant]
        self._mark_seen(held.tenant, now_s)

    def claim_budget(self, num_free_tokens: int, now_s: float) -> tuple[int, ClaimBudget]:
        """Return the branches to claim (0 or less: none) and the rest of the budget. `num_free_tokens`: capacity of the
        available blocks."""
        while self._seen_at_s and next(iter(self._seen_at_s.values())) < now_s - RECENT_S:
            self._seen_at_s.popitem(last=False)
        num_tokens = num_free_tokens - self._num_tokens
        num_branches = self._num_slots + self._num_over_claimed - self._num_branches
        num_tenants = len(self._seen_at_s.keys() | self._branches_by_tenant.keys())
        reserves = num_tenants > 1 and self._num_slots >= RESERVED_DIVISOR
        is_shared = reserves or num_tokens <= 0 or self._has_tenant_over_share()
        return (0 if num_tokens <= 0 else num_branches), ClaimBudget(
            num_tokens=num_tokens,
            num_reserved=self._num_slots // RESERVED_DIVISOR + self._num_over_claimed if reserves else 0,
            num_slots=self._num_slots if is_shared else 0,
            slots_by_tenant=dict(self._branches_by_tenant),
            num_tenants=num_tenants,
            num_reclaimable_tokens=self._num_cache_tokens - self._num_tokens,
            num_held=self._num_branches,
        )

    def _has_tenant_over_share(self) -> bool:
        share = fair_share(self._num_slots, [1, *self._branches_by_tenant.values()])
        return any(count > share for count in self._branches_by_tenant.values())

    def _mark_seen(self, tenant: str, now_s: float) -> None:
        self._seen_at_s[tenant] = now_s
        self._seen_at_s.move_to_end(tenant)

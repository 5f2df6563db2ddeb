"""The rest of a worker's budget during a claim: the reference of `claim.lua`."""

from __future__ import annotations

from collections import Counter

from service.fair_share import fair_share
from service.queue.interface import Claim, ClaimBudget
from service.queue.job_cost import branches_of
from service.queue.messages import Job


class RemainingBudget:
    def __init__(self, num_branches: int, budget: ClaimBudget) -> None:
        self._budget = budget
        self._held = Counter(budget.slots_by_tenant)
        self._num_branches = num_branches
        self._num_tokens = float("inf") if budget.num_tokens is None else budget.num_tokens
        self._num_reclaimable_tokens = budget.num_reclaimable_tokens

    @property
    def is_free(self) -> bool:
        return self._num_branches > 0 and self._num_tokens > 0

    @property
    def is_restricted(self) -> bool:
        """Return whether only tenants within their shares may claim."""
        return self._num_branches <= self._budget.num_reserved or self._num_tokens <= 0

    @property
    def is_reclaimable(self) -> bool:
        """Return whether over shares can be reclaimed for tenants within their own."""
        return self._budget.num_slots > 0 and (self.is_free or self._num_reclaimable_tokens > 0)

    def fits(self, job: Job, waiting: set[str]) -> bool:
        """Return whether the job is within its tenant's share, or its tenant's only one, and can start if all others
        keep to theirs. Recent tenants, and those with jobs `waiting`, count as wanting one slot."""
        held, num_slots = self._held[job.tenant], self._budget.num_slots
        count = held + branches_of(job)
        others = [num for tenant, num in self._held.items() if tenant != job.tenant]
        num_absent = max(self._budget.num_tenants - len(others), len(waiting - self._held.keys()) + (held > 0)) - 1
        share = fair_share(num_slots, [count, *others, *[1] * max(0, num_absent)])
        if held and count > share:
            return False
        return self._num_branches > 0 or count + sum(min(num, share) for num in others) <= num_slots

    def take(self, claim: Claim) -> None:
        count = branches_of(claim.job)
        num_tokens = len(claim.job.prompt) // 4 + len(claim.history) * count
        self._num_branches -= count
        self._num_tokens -= num_tokens
        self._num_reclaimable_tokens -= num_tokens
        self._held[claim.job.tenant] += count

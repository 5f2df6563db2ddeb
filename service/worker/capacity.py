"""What a worker may claim now: as much as its engine can begin, and not all of it for the tenant who asks loudest. What
one holds beyond its share is lent to it (see service/fair_share.py): others may claim though nothing is free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from service.fair_share import fair_share
from service.queue.interface import ClaimBudget
from service.queue.job_cost import branches_of
from service.queue.messages import Job

RESERVED_DIVISOR = 16
"""Of the places one in so many is kept for tenants who hold less than their share, as long as there are several."""
RECENT_S = 30.0
"""A tenant counts for so long after its last job: who asks now and then finds a place, and none stays empty in vain."""
OVER_CLAIM_DIVISOR = 32
"""So many more are claimed than there are places, one for each so many: who ends is followed in the very next step."""


@dataclass
class _Held:
    tenant: str
    num_branches: int
    num_tokens: int  # that the engine must find room for; 0 once it has begun


class SlotCapacity:
    """Of one engine. Times are monotonic seconds."""

    def __init__(self, num_places: int, num_cache_tokens: int, *, is_ahead: bool = True):
        """`num_cache_tokens`: those for which the engine has blocks when it is empty. Without `is_ahead`, no more is
        claimed than there are places, but for what is lent."""
        self._num_slots = num_places
        self._num_cache_tokens = num_cache_tokens
        self._num_ahead = max(1, num_places // OVER_CLAIM_DIVISOR) if is_ahead else 0
        self._held: dict[str, _Held] = {}
        self._num_branches = self._num_tokens = 0
        self._branches_of: Counter[str] = Counter()
        self._seen_at_s: OrderedDict[str, float] = OrderedDict()

    def take(self, job: Job, num_told_tokens: int, now_s: float) -> None:
        """The job is claimed; again, where it was lost and has come back."""
        self.give_back(job.job_id, now_s)
        num_tokens = len(job.prompt) // 4 + num_told_tokens
        self._held[job.job_id] = held = _Held(job.tenant, branches_of(job), num_tokens)
        self._num_branches += held.num_branches
        self._num_tokens += held.num_tokens
        self._branches_of[held.tenant] += held.num_branches
        self._see(held.tenant, now_s)

    def begin(self, job_id: str) -> None:
        """The engine has told something of it: its blocks are its own."""
        held = self._held.get(job_id)
        if held is not None and held.num_tokens:
            self._num_tokens -= held.num_tokens
            held.num_tokens = 0

    def give_back(self, job_id: str, now_s: float) -> None:
        """The job is over here."""
        self.begin(job_id)
        held = self._held.pop(job_id, None)
        if held is None:
            return
        self._num_branches -= held.num_branches
        self._branches_of[held.tenant] -= held.num_branches
        if not self._branches_of[held.tenant]:
            del self._branches_of[held.tenant]
        self._see(held.tenant, now_s)

    def claim_budget(self, num_free_tokens: int, now_s: float) -> tuple[int, ClaimBudget]:
        """Branches that may be claimed, and the rest of it; no more than 0 where nothing is free. `num_free_tokens`:
        those for which the engine has blocks now."""
        while self._seen_at_s and next(iter(self._seen_at_s.values())) < now_s - RECENT_S:
            self._seen_at_s.popitem(last=False)
        num_tokens = num_free_tokens - self._num_tokens
        num_branches = self._num_slots + self._num_ahead - self._num_branches
        num_tenants = len(self._seen_at_s.keys() | self._branches_of.keys())
        keeps = num_tenants > 1 and self._num_slots >= RESERVED_DIVISOR
        return (0 if num_tokens <= 0 else num_branches), ClaimBudget(
            num_tokens=num_tokens,
            num_reserved=self._num_slots // RESERVED_DIVISOR + self._num_ahead if keeps else 0,
            num_slots=self._num_slots if keeps or num_tokens <= 0 or self._lends() else 0,
            slots_by_tenant=dict(self._branches_of),
            num_tenants=num_tenants,
            num_reclaimable_tokens=self._num_cache_tokens - self._num_tokens,
        )

    def _lends(self) -> bool:
        """Whether somebody holds more than its share, if one more comes."""
        share = fair_share(self._num_slots, [1, *self._branches_of.values()])
        return any(count > share for count in self._branches_of.values())

    def _see(self, tenant: str, now_s: float) -> None:
        self._seen_at_s[tenant] = now_s
        self._seen_at_s.move_to_end(tenant)

"""Schedules grammar compilations fairly between tenants, bounded in jobs and bytes.

1. Tenants with fewer running jobs go first, then those with less recent compile time, then first come, first served.
2. Tenants with more than HEAVY_S of recent compile time share all processes but one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from service.errors import RequestError
from service.gateway.grammars.results import Result

MAX_JOBS_PER_TENANT = 1024
MAX_BYTES_PER_TENANT = 16 << 20
MAX_BYTES = 64 << 20
RETRY_AFTER_S = 2
FREE_S = 0.05
"""Seconds of each compilation that are not charged, so that ordinary grammars make no tenant heavy."""
HEAVY_S = 0.5
HALF_LIFE_S = 15.0
MAX_TENANTS_KNOWN = 4096


@dataclass(eq=False)
class CompileJob:
    """A task that at least one request waits for."""

    tenant: str
    key: bytes
    task: bytes
    result: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_waiting: int = 0
    num_crashes: int = 0  # of processes that compiled it
    started_s: float = 0.0
    slot: object | None = None  # the slot it runs in


class CompileQueue:
    def __init__(self, num_processes: int, clock: Callable[[], float]) -> None:
        self._num_processes = num_processes
        self._clock = clock
        self._waiting: dict[str, deque[CompileJob]] = {}  # by tenant, ordered by oldest job
        self._num_bytes: Counter[str] = Counter()
        self._used_s: dict[str, tuple[float, float]] = {}  # by tenant: (seconds, when computed)

    @property
    def num_jobs(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, job: CompileJob) -> None:
        """Add a job. Raises RequestError: 429 if the tenant's queue is full, 503 if the total is reached."""
        own = self._waiting.get(job.tenant, ())
        if len(own) >= MAX_JOBS_PER_TENANT or self._num_bytes[job.tenant] + len(job.task) > MAX_BYTES_PER_TENANT:
            message = f"{len(own)} of your grammars wait to be compiled already."
            raise RequestError(429, message, "rate_limit_error", code="queue_share_full", retry_after_s=RETRY_AFTER_S)
        if self._num_bytes.total() + len(job.task) > MAX_BYTES:
            raise overloaded()
        self._waiting.setdefault(job.tenant, deque()).append(job)
        self._num_bytes[job.tenant] += len(job.task)

    def put_back(self, job: CompileJob) -> None:
        """Return an interrupted job to the front of its tenant's queue."""
        self._waiting.setdefault(job.tenant, deque()).appendleft(job)
        self._num_bytes[job.tenant] += len(job.task)

    def remove(self, job: CompileJob) -> None:
        own = self._waiting.get(job.tenant)
        if own is not None and job in own:
            own.remove(job)
            self._uncount(job)

    def next_job(self, running: Collection[CompileJob]) -> CompileJob | None:
        by_tenant = Counter(job.tenant for job in running)
        num_heavy = sum(self.is_heavy(job.tenant) for job in running)
        has_room = num_heavy < max(1, self._num_processes - 1)
        tenants = [tenant for tenant in self._waiting if has_room or not self.is_heavy(tenant)]
        if not tenants:
            return None
        tenant = min(tenants, key=lambda name: (by_tenant[name], self.used_s(name)))  # the first of equals
        job = self._waiting[tenant].popleft()
        self._uncount(job)
        if tenant in self._waiting:
            self._waiting[tenant] = self._waiting.pop(tenant)
        return job

    def charge(self, tenant: str, elapsed_s: float, *, is_long: bool = False) -> None:
        """Charge compile time to a tenant; `is_long` makes it heavy at once."""
        used_s = self.used_s(tenant) + max(0.0, elapsed_s - FREE_S)
        self._used_s[tenant] = (max(used_s, 2 * HEAVY_S if is_long else 0.0), self._clock())
        if len(self._used_s) > MAX_TENANTS_KNOWN:
            del self._used_s[min(self._used_s, key=self.used_s)]

    def used_s(self, tenant: str) -> float:
        """Return the tenant's recent compile seconds, which decay with HALF_LIFE_S."""
        used_s, at_s = self._used_s.get(tenant, (0.0, 0.0))
        decay: float = 0.5 ** ((self._clock() - at_s) / HALF_LIFE_S)
        return used_s * decay

    def is_heavy(self, tenant: str) -> bool:
        return self.used_s(tenant) > HEAVY_S

    def _uncount(self, job: CompileJob) -> None:
        self._num_bytes[job.tenant] -= len(job.task)
        if not self._waiting[job.tenant]:
            del self._waiting[job.tenant], self._num_bytes[job.tenant]


def overloaded() -> RequestError:
    message = "Too many grammars wait to be compiled."
    return RequestError(503, message, "server_error", code="overloaded", retry_after_s=RETRY_AFTER_S)

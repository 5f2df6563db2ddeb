"""Which grammar is compiled next: fair between tenants, bounded in jobs and bytes.

1. A tenant with fewer grammars in work goes first, then one whose grammars took less time lately, then who came first.
2. Tenants whose grammars took more than HEAVY_S lately share all processes but one: it is left to the others.
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
"""Of each grammar: usual ones make nobody heavy, however many they are."""
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
    num_waiting: int = 0  # requests
    num_crashes: int = 0  # of processes that compiled it
    started_s: float = 0.0
    slot: object | None = None  # where it runs


class CompileQueue:
    def __init__(self, num_processes: int, clock: Callable[[], float]) -> None:
        self._num_processes = num_processes
        self._clock = clock
        self._waiting: dict[str, deque[CompileJob]] = {}  # by tenant, in the order of their oldest job
        self._num_bytes: Counter[str] = Counter()  # by tenant
        self._used_s: dict[str, tuple[float, float]] = {}  # by tenant: seconds, and when they were that many

    @property
    def num_jobs(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, job: CompileJob) -> None:
        """Raises RequestError: 429 where its tenant waits for too much already, 503 where all do."""
        own = self._waiting.get(job.tenant, ())
        if len(own) >= MAX_JOBS_PER_TENANT or self._num_bytes[job.tenant] + len(job.task) > MAX_BYTES_PER_TENANT:
            message = f"{len(own)} of your grammars wait to be compiled already."
            raise RequestError(429, message, "rate_limit_error", code="queue_share_full", retry_after_s=RETRY_AFTER_S)
        if self._num_bytes.total() + len(job.task) > MAX_BYTES:
            raise overloaded()
        self._waiting.setdefault(job.tenant, deque()).append(job)
        self._num_bytes[job.tenant] += len(job.task)

    def put_back(self, job: CompileJob) -> None:
        """A job that was taken and interrupted is its tenant's next."""
        self._waiting.setdefault(job.tenant, deque()).appendleft(job)
        self._num_bytes[job.tenant] += len(job.task)

    def remove(self, job: CompileJob) -> None:
        """Nothing happens where it does not wait."""
        own = self._waiting.get(job.tenant, ())
        if job in own:
            own.remove(job)
            self._forget(job)

    def take(self, running: Collection[CompileJob]) -> CompileJob | None:
        """The next job, if one may run beside those that do."""
        by_tenant = Counter(job.tenant for job in running)
        num_heavy = sum(self.is_heavy(job.tenant) for job in running)
        has_room = num_heavy < max(1, self._num_processes - 1)
        tenants = [tenant for tenant in self._waiting if has_room or not self.is_heavy(tenant)]
        if not tenants:
            return None
        tenant = min(tenants, key=lambda name: (by_tenant[name], self.used_s(name)))  # of equal ones the first
        job = self._waiting[tenant].popleft()
        self._forget(job)
        if tenant in self._waiting:
            self._waiting[tenant] = self._waiting.pop(tenant)
        return job

    def charge(self, tenant: str, elapsed_s: float, *, is_long: bool = False) -> None:
        """A grammar of this tenant took so long; one that `is_long` makes it heavy at once."""
        used_s = self.used_s(tenant) + max(0.0, elapsed_s - FREE_S)
        self._used_s[tenant] = (max(used_s, 2 * HEAVY_S if is_long else 0.0), self._clock())
        if len(self._used_s) > MAX_TENANTS_KNOWN:
            del self._used_s[min(self._used_s, key=self.used_s)]

    def used_s(self, tenant: str) -> float:
        """Seconds that its grammars took; those of HALF_LIFE_S ago count half."""
        used_s, at_s = self._used_s.get(tenant, (0.0, 0.0))
        return used_s * 0.5 ** ((self._clock() - at_s) / HALF_LIFE_S)

    def is_heavy(self, tenant: str) -> bool:
        return self.used_s(tenant) > HEAVY_S

    def _forget(self, job: CompileJob) -> None:
        self._num_bytes[job.tenant] -= len(job.task)
        if not self._waiting[job.tenant]:
            del self._waiting[job.tenant], self._num_bytes[job.tenant]


def overloaded() -> RequestError:
    """The 503 where grammars wait too long."""
    message = "Too many grammars wait to be compiled."
    return RequestError(503, message, "server_error", code="overloaded", retry_after_s=RETRY_AFTER_S)

"""The order of waiting jobs, in memory: the reference of `fair.lua`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from service.queue.job_cost import AGE_S, BATCH_AGE_S, LANES, NORMAL, cost_of, lane_of
from service.queue.messages import Job
from tests.fakes.queue.steady_time import unix_s


class FairQueue:
    """Waiting jobs. Tenants take turns by the cost of their jobs; a tenant's jobs go by priority and age."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[Job, float]] = {}  # by id, with rank
        self._turns: dict[tuple[str, str], int] = {}  # (lane, tenant) with jobs -> virtual time of its next turn
        self._times: dict[str, int] = {}  # tenant -> virtual time
        self._clock = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs[job.job_id] = (job, unix_s() + job.priority * AGE_S)
        self._turns.setdefault((lane_of(job), job.tenant), self._virtual_time(job.tenant))

    def remove(self, job_id: str) -> None:
        job, _ = self._jobs.pop(job_id, (None, 0.0))
        if job is not None and not self._ranks_of(job):
            del self._turns[lane_of(job), job.tenant]

    def charge(self, job: Job) -> None:
        """End the turn of a served job's tenant."""
        self._clock = self._virtual_time(job.tenant)
        ahead = self._times[job.tenant] = self._clock + cost_of(job)
        self._turns |= {(lane, job.tenant): ahead for lane in LANES if (lane, job.tenant) in self._turns}

    def settle(self, job: Job, num_tokens: int) -> None:
        """Replace an ended job's estimated cost by `num_tokens`."""
        if job.tenant in self._times:
            self._times[job.tenant] += num_tokens - cost_of(job)
            at_time = self._virtual_time(job.tenant)
            self._turns |= {(lane, job.tenant): at_time for lane in LANES if (lane, job.tenant) in self._turns}

    def tenants(self) -> set[str]:
        """Return the tenants with waiting jobs, batch jobs left out."""
        return {tenant for lane, tenant in self._turns if lane == NORMAL}

    def next(self, passed_over: Collection[str] = (), lanes: Sequence[str] = LANES) -> str | None:
        """Return the next job of tenants not in `passed_over`; None without one."""
        best = None
        for lane in lanes:
            turns = sorted(
                (at_time, tenant)
                for (its_lane, tenant), at_time in self._turns.items()
                if its_lane == lane and tenant not in passed_over
            )
            if not turns:
                continue
            at_time, tenant = turns[0]
            rank, job_id = min(
                (rank, job_id)
                for job_id, (job, rank) in self._jobs.items()
                if (lane_of(job), job.tenant) == (lane, tenant)
            )
            if best is None or (unix_s() - rank >= BATCH_AGE_S and (at_time, rank) < best[:2]):
                best = (at_time, rank, job_id)
        return None if best is None else best[2]

    def position(self, job_id: str) -> int | None:
        """Return how many of the tenant's own jobs precede this one."""
        if job_id not in self._jobs:
            return None
        job, own_rank = self._jobs[job_id]
        return sum(rank < own_rank for rank in self._ranks_of(job))

    def waited_s(self, job_id: str) -> float:
        job, rank = self._jobs[job_id]
        return unix_s() - (rank - job.priority * AGE_S)

    def since(self, lane: str) -> list[float]:
        """Return when the lane's jobs were accepted, in any order; Unix seconds."""
        return [rank - job.priority * AGE_S for job, rank in self._jobs.values() if lane_of(job) == lane]

    def waiting(self, tenant: str | None = None) -> tuple[int, int]:
        """Return number and cost in tokens of the waiting jobs, of one tenant or of all."""
        found = [job for job, _ in self._jobs.values() if tenant in (None, job.tenant)]
        return len(found), sum(map(cost_of, found))

    def _ranks_of(self, own: Job) -> list[float]:
        """Return the ranks of the waiting jobs of this one's lane and tenant."""
        turn = (lane_of(own), own.tenant)
        return [rank for job, rank in self._jobs.values() if (lane_of(job), job.tenant) == turn]

    def _virtual_time(self, tenant: str) -> int:
        return max(self._clock, self._times.get(tenant, 0))

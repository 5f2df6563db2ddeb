"""Shared state of the queues in memory: jobs, claims, leases, logs. The reference of the Lua scripts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from service.errors import EndReason
from service.queue import keys
from service.queue.interface import (
    RETURNED,
    SUSPECT,
    Backlog,
    Bounds,
    Claim,
    ClaimBudget,
    IngressEntry,
    Lane,
    QueueFull,
    QueueState,
)
from service.queue.job_cost import LANES, NORMAL, RECLAIM_AFTER_S, cost_of
from service.queue.messages import Cancel, Event, Job, Usage, WorkerCard
from tests.fakes.queue.batches import MemoryBatchData
from tests.fakes.queue.claim_budget import RemainingBudget
from tests.fakes.queue.fair_queue import FairQueue
from tests.fakes.queue.jobs import Deaths, JobState, Log
from tests.fakes.queue.requests import RequestData
from tests.fakes.queue.responses import ResponseData
from tests.fakes.queue.steady_time import unix_s


class QueueData:
    """State on one event loop. `news` is replaced at each change."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.logs: dict[str, Log] = {}
        self.cancels: list[Cancel] = []
        self.cards: dict[str, WorkerCard] = {}
        self.looked_at_until_s = 0.0
        self.replies: dict[tuple[str, str], list[bytes]] = {}  # by producer and its name for the job
        self.reply_owners: dict[tuple[str, str], IngressEntry] = {}
        self.replies_done: set[tuple[str, str]] = set()
        self.requests = RequestData()
        self.batch_data = MemoryBatchData()
        self.responses: ResponseData = {}
        self.adapters: dict[str, bytes] = {}
        self.dead: list[tuple[Job, str]] = []
        self._ingress: dict[str, deque[IngressEntry]] = {}
        self._states: dict[str, JobState] = {}
        self._waiting = FairQueue()
        self._returned: deque[str] = deque()
        self._suspects: deque[str] = deque()
        self._tombstones: dict[str, EndReason] = {}
        self._leases: dict[str, float] = {}  # worker -> monotonic time of its end
        self._runs_suspects: str | None = None
        self._num_entries = 0
        self._deaths = Deaths()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._returned) + len(self._suspects)

    def state(self) -> QueueState:
        lanes = {lane: self._waiting.since(lane) for lane in LANES}
        for lane, queue in ((RETURNED, self._returned), (SUSPECT, self._suspects)):
            lanes[lane] = [self._states[job_id].put_back_at_s for job_id in queue]
        now_s = time.monotonic()
        return QueueState(
            {lane: Lane(len(since), min(since, default=None)) for lane, since in lanes.items()},
            sum(ends_at_s >= now_s for ends_at_s in self._leases.values()),
        )

    @property
    def num_claimable(self) -> int:
        return len(self._waiting) + len(self._returned)

    def submit(self, job: Job, bounds: Bounds, keep_record: Callable[[], None] | None = None) -> bool:
        """Accept a job; return whether it is new. `keep_record` is called once the job is within its bounds. Raises
        QueueFull, and what `keep_record` raises."""
        self._drop_expired_logs()
        if self.has(job.job_id):
            return False
        if job.job_id not in self._tombstones:
            self._check_bounds(job, bounds)
        if keep_record is not None:
            keep_record()
        self._states[job.job_id] = JobState(job)
        self._waiting.add(job)
        reason = self._tombstones.pop(job.job_id, None)
        if reason is not None:
            self._end(job.job_id, reason)
        self.wake_waiters()
        return True

    def has(self, job_id: str) -> bool:
        """Return whether the job was accepted; true until LOG_ENDED_TTL_S after its end."""
        return job_id in self._states or job_id in self.logs

    def _check_bounds(self, job: Job, bounds: Bounds) -> None:
        for tenant, max_jobs, max_tokens in (
            (job.tenant, None, bounds.max_tokens_per_tenant),
            (None, bounds.max_jobs, bounds.max_tokens),
        ):
            num_jobs, num_tokens = self._waiting.waiting(tenant)
            is_over = max_tokens is not None and num_tokens > 0 and num_tokens + cost_of(job) > max_tokens
            if is_over or (max_jobs is not None and num_jobs >= max_jobs):
                raise QueueFull(of_tenant=tenant is not None, num_jobs=num_jobs, num_tokens=num_tokens)

    def backlog(self, tenant: str) -> Backlog:
        _, num_own_tokens = self._waiting.waiting(tenant)
        _, num_tokens = self._waiting.waiting()
        return Backlog(self.num_waiting, num_tokens, num_own_tokens)

    def queue_position(self, job_id: str) -> int | None:
        return self._waiting.position(job_id)

    def cancel(self, cancel: Cancel) -> None:
        state = self._states.get(cancel.job_id)
        log = self.logs.get(cancel.job_id)
        if state is None:
            if cancel.branch is None and (log is None or log.ended_at_s is None):
                self._tombstones.setdefault(cancel.job_id, cancel.reason)
            return
        if cancel.branch is not None:
            state.stops += (cancel,)
        elif state.owner is None:
            self._end(cancel.job_id, cancel.reason)
            return
        else:
            state.cancel = state.cancel or cancel.reason
        self.cancels.append(cancel)
        self.wake_waiters()

    def claim(self, owner: str, max_branches: int, budget: ClaimBudget) -> Sequence[Claim]:
        """Claim jobs within the budget; those claimed before come first."""
        claims, left = [], RemainingBudget(max_branches, budget)
        while (job_id := self._next(left)) is not None:
            is_new = job_id in self._waiting
            claim = self._take(job_id, owner)
            if claim is not None:
                claims.append(claim)
                left.take(claim)
                if is_new:
                    self._waiting.charge(claim.job)
        return claims

    def _next(self, left: RemainingBudget) -> str | None:
        """Return the next job within the budget."""
        if left.is_free and self._returned:
            return self._returned[0]
        if not left.is_restricted:
            return self._waiting.next()
        if not left.is_reclaimable:
            return None
        waiting = self._waiting.tenants()

        def fits(job_id: str) -> bool:
            return left.fits(self._states[job_id].job, waiting)

        if not left.is_free and (job_id := next(filter(fits, self._returned), None)):
            return job_id
        passed_over, lanes = set(), LANES if left.is_free else (NORMAL,)
        while (job_id := self._waiting.next(passed_over, lanes)) is not None:
            if fits(job_id) and (left.is_free or self._has_waited(job_id)):
                break
            passed_over.add(self._states[job_id].job.tenant)
        return job_id

    def _has_waited(self, job_id: str) -> bool:
        """Return whether another worker, if there is one, had time to claim the job into a free slot."""
        return len(self._leases) < 2 or self._waiting.waited_s(job_id) >= RECLAIM_AFTER_S

    def claim_suspect(self, owner: str) -> Claim | None:
        while self._suspects:
            claim = self._take(self._suspects[0], owner)
            if claim is not None:
                return claim
        return None

    def owns(self, job_id: str, owner: str, attempt: int) -> bool:
        state = self._states.get(job_id)
        return state is not None and (state.owner, state.attempts) == (owner, attempt)

    def write(self, event: Event, owner: str, attempt: int) -> bool:
        """Append an event, once; its end settles the job. Return False if the job is not this worker's."""
        if not self.owns(event.job_id, owner, attempt):
            return False
        log = self.logs.setdefault(event.job_id, Log())
        if event.number == len(log.events) + 1:
            log.events.append(event)
        if event.end is not None:
            log.ended_at_s = time.monotonic()
            state = self._states.pop(event.job_id)
            if event.usage is not None:
                self._waiting.settle(state.job, event.usage.prompt_tokens + event.usage.completion_tokens)
        return True

    def count_death(self) -> None:
        """Note that an engine died."""
        self._deaths.count()

    def put_back(self, job_id: str, cause: str | None) -> None:
        """Queue a claimed job again. `cause`: what the engine died of while it was in flight, at the last counted
        death."""
        state = self._states[job_id]
        if state.cancel is not None:
            self._end(job_id, state.cancel)
            return
        state.put_back(self._num_events(job_id), cause, self._deaths)
        (self._suspects if state.is_suspect and not state.is_deadly else self._returned).append(job_id)

    def take_over(self, owner: str, has_predecessor: bool) -> int:
        """Put back the jobs of dead workers, `owner`'s predecessor included, and return their number; end waiting jobs
        past their deadline."""
        now_s = time.monotonic()
        dead = {name for name, ends_at_s in self._leases.items() if ends_at_s < now_s} - {owner}
        dead |= {owner} if has_predecessor else set()
        num_orphans = 0
        for name in dead:
            self._leases.pop(name, None)
            orphans = [job_id for job_id, state in self._states.items() if state.owner == name]
            if orphans or name != owner:
                self.count_death()
            num_orphans += len(orphans)
            for job_id in orphans:
                self.put_back(job_id, f"the worker {name} died")
        for job_id in [job_id for job_id, state in self._states.items() if not state.owner and state.is_past_deadline]:
            self._end(job_id, EndReason.DEADLINE)
        self.wake_waiters()
        return num_orphans

    def start_lease(self, owner: str, lease_s: float) -> None:
        self._leases.setdefault(owner, time.monotonic() + lease_s)

    def renew_lease(self, owner: str, lease_s: float) -> None:
        self._leases[owner] = time.monotonic() + lease_s

    def end_lease(self, owner: str) -> None:
        self._leases.pop(owner, None)

    def runs_suspects(self, owner: str) -> bool:
        """Return whether `owner` runs suspects: one worker does while its lease runs and a suspect is left."""
        if self._runs_suspects is not None and self._leases.get(self._runs_suspects, 0.0) < time.monotonic():
            self._runs_suspects = None
        if self._suspects and self._runs_suspects is None:
            self._runs_suspects = owner
        elif not self._suspects and self._runs_suspects == owner:
            self._runs_suspects = None
        return self._runs_suspects == owner

    def ingress_of(self, producer: str) -> deque[IngressEntry]:
        return self._ingress.setdefault(keys.ingress(producer), deque())

    def produce(self, producer: str, payload: bytes, was_left: bool) -> None:
        self._num_entries += 1
        self.give_entry(IngressEntry(producer, f"{self._num_entries}-0", payload, was_left))

    def give_entry(self, entry: IngressEntry) -> None:
        self.ingress_of(entry.producer).append(entry)
        self.wake_waiters()

    def write_reply(self, name: tuple[str, str], number: int, payload: bytes) -> None:
        """Append a reply, once for each number."""
        replies = self.replies.setdefault(name, [])
        if number > len(replies):
            replies.append(payload)

    def replies_of(self, producer: str, producer_job_id: str) -> Sequence[bytes]:
        return tuple(self.replies.get((producer, producer_job_id), ()))

    def fresh_cards(self) -> Sequence[WorkerCard]:
        fresh_since_s = unix_s() - keys.CARD_TTL_S
        return [card for card in self.cards.values() if card.beat_at_s >= fresh_since_s]

    def wake_waiters(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def wait_until(self, is_there: Callable[[], object], wait_s: float) -> None:
        """Wait until `is_there` holds, at most `wait_s`."""
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while not is_there():
                    await self.news.wait()
        except TimeoutError:
            return

    def _take(self, job_id: str, owner: str) -> Claim | None:
        """Claim a job; None if it ended instead."""
        state = self._states[job_id]
        if state.is_deadly:
            self.dead.append((state.job, state.cause))
            self._end(job_id, EndReason.POISONED)
            return None
        if state.is_past_deadline:
            self._end(job_id, EndReason.DEADLINE)
            return None
        self._leave_queue(job_id)
        state.owner, state.attempts, state.num_events = owner, state.attempts + 1, self._num_events(job_id)
        history = tuple(self.logs[job_id].events) if job_id in self.logs else ()
        return Claim(state.job, state.attempts, state.alone_for_events, history, state.stops)

    def _num_events(self, job_id: str) -> int:
        return len(self.logs[job_id].events) if job_id in self.logs else 0

    def _end(self, job_id: str, reason: EndReason) -> None:
        """End a job that no engine runs."""
        self._leave_queue(job_id)
        log = self.logs.setdefault(job_id, Log())
        usage = Usage(prompt_tokens=0, completion_tokens=0)
        log.events.append(Event(job_id=job_id, number=len(log.events) + 1, end=reason, usage=usage))
        log.ended_at_s = time.monotonic()
        del self._states[job_id]
        self.wake_waiters()

    def _leave_queue(self, job_id: str) -> None:
        self._waiting.remove(job_id)
        for queue in (self._returned, self._suspects):
            if job_id in queue:
                queue.remove(job_id)

    def _drop_expired_logs(self) -> None:
        old_s = time.monotonic() - keys.LOG_ENDED_TTL_S
        for job_id in [job_id for job_id, log in self.logs.items() if log.ended_at_s and log.ended_at_s < old_s]:
            del self.logs[job_id]

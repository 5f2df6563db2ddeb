"""Asyncio side of a worker: jobs, events, heartbeats, cancels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from service.engine.output_processor import EngineOutput, iter_request_outputs
from service.engine.request import AdapterSource, EngineRequest
from service.errors import EndReason
from service.observability.logs import fields
from service.observability.tracing import NO_TRACING, Tracing
from service.observability.worker_metrics import JOBS, read_stats
from service.queue.codec import unpack_ids
from service.queue.interface import Claim, ClaimBudget, Lease, QueueUnavailable, WorkerQueue
from service.queue.messages import Event, WorkerCard
from service.worker.capacity import SlotCapacity
from service.worker.engine_thread import Add, Cancel, EngineThread
from service.worker.events import refusal
from service.worker.job_counts import ClaimTimes, JobCounts
from service.worker.open_jobs import EarlyCancels, OpenJob, outputs_by_job
from service.worker.peers import has_replacement
from service.worker.recovery import branch_histories, keep_lease, num_scored_tokens
from service.worker.spans import log_claim, spans_of

log = logging.getLogger("quire.job_loop")

Result = TypeVar("Result")

FETCH_WAIT_S = 0.5
HEARTBEAT_S = 1.0
RETRY_S = 0.2
LOOK_AGAIN_S = 0.015
"""Claim interval while nearly full, when waiting jobs may exceed the budget."""


class OutputInbox:
    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._outputs: list[EngineOutput] = []

    def on_outputs(self, outputs: list[EngineOutput]) -> None:
        """Pass outputs to the loop. Called on the engine thread."""
        self._loop.call_soon_threadsafe(self._append, outputs)

    def drain_outputs(self) -> list[EngineOutput]:
        self.arrived.clear()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _append(self, outputs: list[EngineOutput]) -> None:
        self._outputs += outputs
        self.arrived.set()


class EngineSizes(NamedTuple):
    vocab_size: int
    num_slots: int
    num_cache_tokens: int  # in all blocks


class JobLoop:
    def __init__(
        self,
        queue: WorkerQueue,
        engine: EngineThread,
        inbox: OutputInbox,
        make_card: Callable[[bool], WorkerCard],
        sizes: EngineSizes,
        tracing: Tracing = NO_TRACING,
    ):
        """`make_card(ready)` returns the card without job statistics."""
        self._queue = queue
        self._engine = engine
        self._inbox = inbox
        self._tracing = tracing
        self._make_card = make_card
        self._vocab_size = sizes.vocab_size
        self._slots = SlotCapacity(sizes.num_slots, sizes.num_cache_tokens)
        self._model = ""
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, OpenJob] = {}
        self._refused: list[Event] = []
        self._publishing = asyncio.Lock()
        self._early_cancels = EarlyCancels()
        self._runs_suspects = False
        self._runs_alone = False  # with a suspect
        self._draining = False
        self._counts = JobCounts()
        self._fetching_ended = asyncio.Event()
        self.announced = asyncio.Event()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Serve until cancelled or a duty fails. `drain` and `abandon` end fetching."""
        duties = (self._fetch, self._publish, self._forward_cancels, self._beat, self._keep_lease)
        tasks = [asyncio.create_task(duty(), name=duty.__name__) for duty in duties]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Stop claiming. After `timeout_s`, or once another worker is ready or `at_once` is set, return open jobs to
        the queue."""
        self._end_fetching()
        try:
            async with asyncio.timeout(timeout_s):
                while self._open and not at_once.is_set() and not await self._persist(self._has_replacement):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            log.warning("drain time is over %s", fields(num_open=self.num_open))
        await self._fetching_ended.wait()  # else it would claim the returned jobs
        for job in self._open.values():
            job.is_leaving = True
            self._engine.send(Cancel(job.request_id, EndReason.SHUTDOWN))

    async def abandon(self, in_flight: Collection[str], cause: str) -> None:
        """Publish a dead engine's outputs and return open jobs, blaming `cause` on those `in_flight`, which become
        suspects."""
        self._end_fetching()
        await self._fetching_ended.wait()
        await self._publish_all()
        blamed = [job_id for job_id, job in self._open.items() if job.request_id in in_flight]
        await self._persist(lambda: self._queue.hand_back(blamed, cause))
        await self._persist(lambda: self._queue.hand_back(list(self._open)))
        for job_id in list(self._open):
            self._close(job_id)

    async def wait_idle(self) -> None:
        while self._open:
            await asyncio.sleep(0.02)

    def _end_fetching(self) -> None:
        self._draining = True
        self._queue.stop_fetching()

    async def _fetch(self) -> None:
        self._model = self._make_card(False).model
        await self._persist(self._take_over)
        while not self._draining:
            max_branches, budget = self._slots.claim_budget(self._engine.num_free_tokens, self._loop.time())
            has_capacity = max_branches > 0 or budget.num_slots
            if not has_capacity or (self._open and (self._runs_suspects or self._runs_alone)):
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            try:
                await self._fetch_some(max_branches, budget)
            except QueueUnavailable as error:
                log.warning("no jobs fetched: %s", error)
                await asyncio.sleep(RETRY_S)
        self._fetching_ended.set()

    async def _fetch_some(self, max_branches: int, budget: ClaimBudget) -> None:
        self._runs_alone = False
        if self._runs_suspects:
            suspect = await self._queue.fetch_suspect()
            self._runs_suspects = self._runs_alone = suspect is not None
            claims: Sequence[Claim] = [] if suspect is None else [suspect]
        else:
            wait_s = LOOK_AGAIN_S if budget.is_restricted(max_branches) else FETCH_WAIT_S
            claims = await self._queue.fetch(max_branches, wait_s, budget)
        for claim in claims:
            # `fetch` returns a suspect whose claim was cut off.
            if self._draining or (claim.is_suspect and not self._runs_alone):
                await self._persist(partial(self._queue.hand_back, [claim.job.job_id]))
            else:
                await self._accept(claim)

    async def _accept(self, claim: Claim) -> None:
        job, next_number = claim.job, len(claim.history) + 1
        request_id = f"{job.job_id}/{claim.attempt}"
        prompt = tuple(unpack_ids(job.prompt))
        is_ours = job.model in (None, self._model)
        if not is_ours:
            log.error("a job of another model; one Redis serves one model %s", fields(job=job.job_id, model=job.model))
        if not is_ours or any(token >= self._vocab_size for token in prompt):
            self._refused.append(refusal(job.job_id, next_number, EndReason.INVALID))
            self._inbox.arrived.set()
            return
        now_s = await self._persist(self._queue.now_s)
        timer = None
        if job.deadline_s is not None:
            end = Cancel(request_id, EndReason.DEADLINE)
            timer = self._loop.call_later(job.deadline_s - now_s, self._engine.send, end)
        times = ClaimTimes(attempt=claim.attempt, queued_s=max(0.0, now_s - job.submitted_at_s))
        spans = spans_of(claim, times, self._tracing)
        cleared_at = len(claim.history) + claim.alone_for_events if claim.is_suspect else None
        self._open[job.job_id] = OpenJob(request_id, next_number, timer, times, spans, cleared_at)
        self._slots.add_job(job, len(claim.history), self._loop.time())
        log_claim(claim)
        self._counts.num_resumed += claim.attempt > 1
        adapter = job.adapter
        request = EngineRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=job.sampling,
            tenant=job.tenant,
            cache_salt=f"{job.tenant}\0{job.cache_salt}" if job.cache_salt else job.tenant,
            num_scored_tokens=num_scored_tokens(claim.history),
            history=branch_histories(claim.history),
            times=times.request,
            adapter=None
            if adapter is None
            else AdapterSource(name=adapter.name, path=adapter.path, digest=adapter.digest),
        )
        self._engine.send(Add(request))
        for cancel in (*claim.stops, *self._early_cancels.pop(job.job_id)):
            self._engine.send(Cancel(request_id, cancel.reason, cancel.branch))

    async def _publish(self) -> None:
        while True:
            await self._inbox.arrived.wait()
            await self._publish_all()

    async def _publish_all(self) -> None:
        async with self._publishing:
            outputs = self._inbox.drain_outputs()
            refused, self._refused = self._refused, []
            events, leaving = self._events(outputs)
            # A gateway handles events in order; first tokens have waited longest.
            events = sorted(refused + events, key=lambda event: event.number > 1)
            if events:
                self._drop(await self._persist(lambda: self._queue.publish(events)))
            for event in events:
                if event.end is not None:
                    self._close(event.job_id, event)
            if self._runs_alone:
                self._clear_suspect()
            if leaving:
                await self._persist(lambda: self._queue.hand_back(leaving))
                for job_id in leaving:
                    self._close(job_id)

    def _events(self, outputs: list[EngineOutput]) -> tuple[list[Event], list[str]]:
        events: list[Event] = []
        leaving: list[str] = []
        for job_id, job_outputs in outputs_by_job(iter_request_outputs(outputs), self._open).items():
            self._slots.mark_started(job_id)
            job_events, is_released = self._open[job_id].events(job_id, job_outputs)
            events += job_events
            if is_released:
                leaving.append(job_id)
        return events, leaving

    def _clear_suspect(self) -> None:
        for job in self._open.values():
            if job.cleared_at_number is not None and job.next_number > job.cleared_at_number and not job.is_leaving:
                job.is_leaving = True
                self._engine.send(Cancel(job.request_id, EndReason.SHUTDOWN))

    def _close(self, job_id: str, last: Event | None = None) -> None:
        """Drop the job. `last`: its last event; None if it continues elsewhere."""
        job = self._open.pop(job_id, None)
        self._slots.remove_job(job_id, self._loop.time())
        if job is not None and job.deadline is not None:
            job.deadline.cancel()
        if job is not None and job.spans is not None:
            job.spans.end(last)
        if job is not None and last is not None and last.end is not None:
            self._counts.observe_end(job.times)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("closed %s", fields(job=job_id, end="elsewhere" if last is None else last.end))

    def _drop(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            job = self._open.get(job_id)
            if job is not None:
                self._counts.num_lost += 1
                self._engine.send(Cancel(job.request_id, EndReason.CANCELLED))
                self._close(job_id)

    async def _forward_cancels(self) -> None:
        while True:
            for cancel in await self._persist(lambda: self._queue.fetch_cancels(FETCH_WAIT_S)):
                job = self._open.get(cancel.job_id)
                if job is not None:
                    self._engine.send(Cancel(job.request_id, cancel.reason, cancel.branch))
                    continue
                self._early_cancels.add(cancel)

    async def _beat(self) -> None:
        while True:
            is_watched = await self._persist(lambda: self._queue.announce(self._card()))
            self._engine.set_watched(is_watched)
            self.announced.set()
            await asyncio.sleep(HEARTBEAT_S)

    def _card(self) -> WorkerCard:
        card = self._make_card(not self._draining)
        self._counts.num_held = len(self._open)
        return replace(card, stats={**card.stats, **read_stats(JOBS, self._counts)})

    async def _keep_lease(self) -> None:
        await keep_lease(self._queue, lambda: self._engine.silent_s, self._on_lease, self._take_over)

    async def _on_lease(self, lease: Lease) -> None:
        self._drop(lease.lost)
        self._runs_suspects = lease.runs_suspects

    async def _take_over(self) -> None:
        self._counts.num_taken_over += await self._queue.take_over()

    async def _has_replacement(self) -> bool:
        return await has_replacement(self._queue, self._make_card(False))

    async def _persist(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Retry until the queue is available, so that no output is lost."""
        while True:
            try:
                return await attempt()
            except QueueUnavailable as error:
                log.warning("queue unavailable, retrying: %s", error)
                await asyncio.sleep(RETRY_S)

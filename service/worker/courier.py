"""The asyncio side of a worker: jobs from the queue to the engine, outputs back as events, heartbeats, cancels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.engine.engine import BranchOutput, Output
from service.engine.sequence import Request
from service.errors import EndReason
from service.logs import fields
from service.wire.broker import BrokerUnavailable, Claim, WorkerBroker
from service.wire.codec import pack_floats, pack_ids, unpack_ids
from service.wire.messages import Event, Part, TokenLogprobs, Usage, WorkerCard
from service.worker.engine_thread import Add, Cancel, EngineThread

log = logging.getLogger("quire.courier")

FETCH_WAIT_S = 0.5
HEARTBEAT_S = 1.0
RETRY_S = 0.2
MAX_AHEAD = 64
"""Claimed jobs that may wait inside this worker; the rest stays in the queue, where others can take it."""


@dataclass
class _OpenJob:
    """A job between its claim and its last event."""

    next_number: int
    deadline: asyncio.TimerHandle | None


class Courier:
    """Runs on the event loop; the engine thread hands it outputs through `deliver`."""

    def __init__(self, broker: WorkerBroker, make_card: Callable[[bool], WorkerCard], vocab_size: int, max_open: int):
        self._broker = broker
        self._make_card = make_card
        self._vocab_size = vocab_size
        self._max_open = max_open
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, _OpenJob] = {}
        self._outputs: list[Output] = []
        self._refused: list[Event] = []
        self._has_news = asyncio.Event()
        self._draining = False
        self._fetching_ended = asyncio.Event()
        self.announced = asyncio.Event()
        self.engine: EngineThread | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def deliver(self, outputs: list[Output]) -> None:
        """Called on the engine thread after a step."""
        self._loop.call_soon_threadsafe(self._take_in, outputs)

    async def run(self) -> None:
        """Until cancelled. Fetching stops for good once `drain` was called."""
        async with asyncio.TaskGroup() as tasks:
            for duty in (self._fetch, self._publish, self._hear_cancels, self._beat):
                tasks.create_task(duty(), name=duty.__name__)

    async def drain(self, timeout_s: float) -> None:
        """Claim nothing more and wait until every open job has its last event out, `timeout_s` at most."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._fetching_ended.wait()  # a claim under way still becomes an open job
                await self.settled()
        except TimeoutError:
            log.warning("drain time is over %s", fields(num_open=self.num_open))

    async def settled(self) -> None:
        """Wait until no job is open."""
        while self._open:
            await asyncio.sleep(0.02)

    async def _fetch(self) -> None:
        while not self._draining:
            room = min(self._max_open - len(self._open), MAX_AHEAD - self.engine.num_waiting)
            if room <= 0:
                await asyncio.sleep(0.01)
                continue
            try:
                claims = await self._broker.fetch(room, FETCH_WAIT_S)
            except BrokerUnavailable as error:
                log.warning("no jobs to be had: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            for claim in claims:
                await self._accept(claim)
        self._fetching_ended.set()

    async def _accept(self, claim: Claim) -> None:
        job = claim.job
        prompt = tuple(unpack_ids(job.prompt))
        if any(token >= self._vocab_size for token in prompt):
            self._refused.append(_end(job.job_id, EndReason.INVALID))
            self._has_news.set()
            return
        timer = None
        if job.deadline_s is not None:
            left_s = job.deadline_s - await self._persist(self._broker.now_s)
            timer = self._loop.call_later(left_s, self.engine.send, Cancel(job.job_id, EndReason.DEADLINE))
        self._open[job.job_id] = _OpenJob(1, timer)
        log.debug("claimed %s", fields(job=job.job_id, prompt_tokens=len(prompt), attempt=claim.attempt))
        self.engine.send(
            Add(Request(request_id=job.job_id, prompt=prompt, sampling=job.sampling, cache_salt=job.tenant))
        )

    def _take_in(self, outputs: list[Output]) -> None:
        self._outputs += outputs
        self._has_news.set()

    async def _publish(self) -> None:
        """Everything since the last round trip goes out in the next, so a slow Redis makes batches, not a queue."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            outputs, self._outputs = self._outputs, []
            refused, self._refused = self._refused, []
            events = refused + self._events(outputs)
            if events:
                await self._persist(lambda events=events: self._broker.publish(events))
            for event in events:
                if event.end is not None:
                    self._close(event)

    def _close(self, event: Event) -> None:
        job = self._open.pop(event.job_id, None)
        if job is not None and job.deadline is not None:
            job.deadline.cancel()
        log.debug("ended %s", fields(job=event.job_id, reason=event.end))

    def _events(self, outputs: list[Output]) -> list[Event]:
        by_job: dict[str, list[Output]] = {}
        for output in outputs:
            by_job.setdefault(output.request_id, []).append(output)
        events = []
        for job_id, news in by_job.items():
            job = self._open[job_id]
            events.append(_event(job_id, job.next_number, news))
            job.next_number += 1
        return events

    async def _hear_cancels(self) -> None:
        while True:
            for cancel in await self._persist(lambda: self._broker.fetch_cancels(FETCH_WAIT_S)):
                if cancel.job_id in self._open:
                    self.engine.send(Cancel(cancel.job_id, cancel.reason, cancel.branch))

    async def _beat(self) -> None:
        while True:
            looked_at = await self._persist(lambda: self._broker.announce(self._make_card(not self._draining)))
            self.engine.show(looked_at)
            self.announced.set()
            await asyncio.sleep(HEARTBEAT_S)

    async def _persist(self, attempt):
        """Ask until the queue answers: what the engine has computed is kept here until it is written there."""
        while True:
            try:
                return await attempt()
            except BrokerUnavailable as error:
                log.warning("the queue is away: %s", error)
                await asyncio.sleep(RETRY_S)


def _event(job_id: str, number: int, outputs: Sequence[Output]) -> Event:
    """One event of a job's outputs since the last one."""
    by_branch: dict[int, list[BranchOutput]] = {}
    for output in outputs:
        for part in output.parts:
            by_branch.setdefault(part.branch, []).append(part)
    last = outputs[-1]
    usage = Usage(
        prompt_tokens=last.num_prompt_tokens,
        completion_tokens=last.num_output_tokens,
        cached_tokens=last.num_cached_tokens,
    )
    return Event(
        job_id=job_id,
        number=number,
        parts=tuple(_part(branch, news) for branch, news in by_branch.items()),
        end=last.end,
        usage=usage if last.end is not None else None,
        choices=last.choices,
    )


def _part(branch: int, news: Sequence[BranchOutput]) -> Part:
    logprobs = [logprob for part in news for logprob in part.logprobs]
    return Part(
        branch=branch,
        tokens=pack_ids([token for part in news for token in part.token_ids]),
        logprobs=TokenLogprobs(
            chosen=pack_floats([logprob.logprob for logprob in logprobs]),
            top_ids=pack_ids([token for logprob in logprobs for token in logprob.top_ids]),
            top=pack_floats([value for logprob in logprobs for value in logprob.top_logprobs]),
        )
        if logprobs
        else None,
        end=news[-1].end,
    )


def _end(job_id: str, reason: EndReason) -> Event:
    return Event(job_id=job_id, number=1, end=reason, usage=Usage(prompt_tokens=0, completion_tokens=0))

"""An open request: the pieces of its answer as its jobs' events come in, and what it has cost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.errors import ENDINGS, EndReason, RequestError
from service.gateway.generation.response_assembler import ChoiceDelta, ResponseAssembler
from service.observability.metrics import RequestTimer
from service.queue.interface import QueueUnavailable
from service.queue.messages import Cancel, Event

MAX_AHEAD = 64
"""Pieces of a request with several prompts that may wait to be told."""


@dataclass(frozen=True)
class Outcome:
    """What an answer that ended well has cost, all its jobs together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class EventStream(Protocol):
    """What the queues' `follow` gives: an iterator that can be let go of before its end."""

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None: ...


class JobStream:
    """One job of an open request: iterate it to its end."""

    def __init__(
        self,
        job_id: str,
        events: EventStream,
        text: ResponseAssembler,
        cancel: Callable[[Cancel], None],
        is_there: bool,
    ) -> None:
        """`is_there`: it was submitted before, and others measure it."""
        self.job_id = job_id
        self._is_there = is_there
        self.text = text
        self.ended_by_worker = False
        self._events = events
        self._cancel = cancel
        self._timer: RequestTimer | None = None
        self._ready: deque[ChoiceDelta] = deque()

    def submitting(self) -> None:
        """From now on the job may be in the queue."""
        self._is_there = True

    def accepted(self, timer: RequestTimer) -> None:
        self._timer = timer

    def refused(self) -> None:
        """The queue did not take it."""
        self._is_there = False

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> ChoiceDelta:
        """The next part of the answer that has anything to tell. Raises RequestError where the job failed,
        QueueUnavailable where its events cannot be read."""
        while not self._ready:
            if self.text.reason is not None:
                raise StopAsyncIteration
            try:
                event = await anext(self._events)
            except StopAsyncIteration:
                raise QueueUnavailable("the events stopped before the end") from None
            self._take(event)
        return self._ready.popleft()

    def _take(self, event: Event) -> None:
        self.ended_by_worker = event.end is not None
        if self._timer is not None:
            self._timer.observe_tokens(sum([len(part.tokens) // 4 for part in event.parts if not part.is_prompt]))
        deltas, stopped = self.text.take(event)
        reason = self.text.reason
        if reason is None:
            for branch in stopped:
                self._cancel(Cancel(job_id=self.job_id, reason=EndReason.STOP, branch=branch))
        elif ENDINGS[reason].finish_reason is None:
            raise failure(reason)
        self._ready += deltas

    def leave(self, reason: EndReason, job_goes_on: bool) -> None:
        """No more is read. A job that still runs is cancelled, unless it `goes_on` without us; one that a stop string
        has ended is in any case. `reason` is why the request ends, if not by itself."""
        reason = self.text.reason or reason
        if self._is_there and not self.ended_by_worker and (reason is EndReason.STOP or not job_goes_on):
            said = reason if reason in (EndReason.STOP, EndReason.DEADLINE) else EndReason.CANCELLED
            self._cancel(Cancel(job_id=self.job_id, reason=said))
        if self._timer is not None:
            self._timer.observe_end(reason)

    async def close(self) -> None:
        await self._events.aclose()


class ResponseStream:
    """One open request: iterate it to its end, then look at `outcome`."""

    def __init__(self, jobs: Sequence[JobStream], num_prompt_tokens: int) -> None:
        self._jobs = jobs
        self._num_prompt_tokens = num_prompt_tokens
        self._deltas = jobs[0] if len(jobs) == 1 else _MergedStream(jobs)

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        return self._deltas

    def leave(self, reason: EndReason, jobs_go_on: bool) -> None:
        """Lets go of every job, ended or not; `reason` is why, where the request does not end by itself."""
        if isinstance(self._deltas, _MergedStream):
            self._deltas.close()
        for job in self._jobs:
            job.leave(reason, jobs_go_on)

    async def close(self) -> None:
        for job in self._jobs:
            await job.close()

    def reasons(self, reason: EndReason) -> list[EndReason]:
        """By job why it ended; `reason` for those that have not."""
        return [job.text.reason or reason for job in self._jobs]

    @property
    def embeddings(self) -> list[bytes]:
        """By prompt its vector float32[H], once the request has ended well. Raises ValueError where one is missing."""
        vectors = [job.text.embedding for job in self._jobs]
        if not all(vectors):
            raise ValueError("a job ended without the vector that it was asked for")
        return vectors

    @property
    def outcome(self) -> Outcome:
        texts = [job.text for job in self._jobs]
        return Outcome(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(text.num_tokens for text in texts),
            cached_tokens=sum(text.cached_tokens for text in texts),
        )


class _MergedStream:
    """The pieces of several jobs as they come; the first that fails fails them all."""

    def __init__(self, jobs: Sequence[JobStream]) -> None:
        self._ready: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(MAX_AHEAD)
        self._num_open = len(jobs)
        self._pumps = [asyncio.create_task(self._pump(job)) for job in jobs]

    def __aiter__(self) -> _MergedStream:
        return self

    async def __anext__(self) -> ChoiceDelta:
        while self._num_open:
            delta = await self._ready.get()
            if isinstance(delta, ChoiceDelta):
                return delta
            if delta is not None:
                raise delta
            self._num_open -= 1
        raise StopAsyncIteration

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    async def _pump(self, job: JobStream) -> None:
        try:
            async for delta in job:
                await self._ready.put(delta)
            await self._ready.put(None)
        except Exception as error:
            await self._ready.put(error)


def failure(reason: EndReason) -> RequestError:
    """What the client of a job hears that did not end well."""
    ending = ENDINGS[reason]
    kind = "invalid_request_error" if ending.status < 499 else "server_error"
    return RequestError(ending.status, ending.message, kind, code=reason.value)

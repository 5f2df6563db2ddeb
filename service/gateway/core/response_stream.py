"""Streams an open request's deltas from its jobs' events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from service.errors import ENDINGS, EndReason
from service.gateway.core.refusals import failure
from service.gateway.core.response_assembler import ChoiceDelta, Outcome, ResponseAssembler
from service.observability.metrics import RequestTimer
from service.queue.interface import EventStream, QueueUnavailable
from service.queue.messages import Cancel, Event

MAX_AHEAD = 16
"""Maximum number of unread delta lists of a request with several prompts."""


class JobStream:
    """Deltas of one job. Each list contains deltas that arrived together."""

    def __init__(
        self,
        job_id: str,
        events: EventStream,
        assembler: ResponseAssembler,
        cancel: Callable[[Cancel], None],
        is_queued: bool,
    ) -> None:
        """`is_queued`: another owner submitted the job and records its metrics."""
        self.job_id = job_id
        self.assembler = assembler
        self._is_queued = is_queued
        self._ended_by_worker = False
        self._events = events
        self._cancel = cancel
        self._timer: RequestTimer | None = None

    def note_submitting(self) -> None:
        self._is_queued = True

    def note_accepted(self, timer: RequestTimer) -> None:
        self._timer = timer

    def note_refused(self) -> None:
        self._is_queued = False

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        """Raises RequestError for a failed job, QueueUnavailable if events cannot be read."""
        deltas: list[ChoiceDelta] = []
        while not deltas:
            reason = self.assembler.reason
            if reason is not None:
                if ENDINGS[reason].finish_reason is None:
                    raise failure(reason)
                raise StopAsyncIteration
            try:
                event = await anext(self._events)
            except StopAsyncIteration:
                raise QueueUnavailable("the events stopped before the end") from None
            deltas = self._deltas_of(event)
            for arrived in self._events.take_arrived():
                if self.assembler.reason is None:  # else a stop string has ended the response
                    deltas += self._deltas_of(arrived)
        return deltas

    def _deltas_of(self, event: Event) -> list[ChoiceDelta]:
        self._ended_by_worker = event.end is not None
        if self._timer is not None:
            self._timer.observe_tokens(sum([len(part.tokens) // 4 for part in event.parts if not part.is_prompt]))
        deltas, stopped = self.assembler.push(event)
        reason = self.assembler.reason
        if reason is None:
            for branch in stopped:
                self._cancel(Cancel(job_id=self.job_id, reason=EndReason.STOP, branch=branch))
        elif ENDINGS[reason].finish_reason is None:
            return []
        return deltas

    def leave(self, reason: EndReason, *, job_goes_on: bool) -> None:
        """Stop reading. Cancel a running job unless `job_goes_on`; after a stop string, always.

        `reason`: why the request ends, if the job has not ended.
        """
        reason = self.assembler.reason or reason
        if self._is_queued and not self._ended_by_worker and (reason is EndReason.STOP or not job_goes_on):
            sent = reason if reason in (EndReason.STOP, EndReason.DEADLINE) else EndReason.CANCELLED
            self._cancel(Cancel(job_id=self.job_id, reason=sent))
        if self._timer is not None:
            self._timer.observe_end(reason, self.assembler.most_tokens)

    async def close(self) -> None:
        await self._events.aclose()


class ResponseStream:
    """Deltas of an open request. Each list contains deltas that arrived together."""

    def __init__(self, jobs: Sequence[JobStream], num_prompt_tokens: int) -> None:
        self._jobs = jobs
        self._num_prompt_tokens = num_prompt_tokens
        self._deltas: JobStream | _MergedStream = jobs[0] if len(jobs) == 1 else _MergedStream(jobs)

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        return self._deltas

    async def read_all(self) -> list[ChoiceDelta]:
        return [delta async for deltas in self for delta in deltas]

    @property
    def has_ended(self) -> bool:
        """True if all jobs have ended successfully: reading on will not wait."""
        for job in self._jobs:
            reason = job.assembler.reason
            if reason is None or ENDINGS[reason].finish_reason is None:
                return False
        return True

    def leave(self, reason: EndReason, *, jobs_go_on: bool) -> None:
        if isinstance(self._deltas, _MergedStream):
            self._deltas.close()
        for job in self._jobs:
            job.leave(reason, job_goes_on=jobs_go_on)

    async def close(self) -> None:
        for job in self._jobs:
            await job.close()

    def reasons(self, reason: EndReason) -> list[EndReason]:
        """Return each job's end reason, or `reason` if it has not ended."""
        return [job.assembler.reason or reason for job in self._jobs]

    @property
    def embeddings(self) -> list[bytes]:
        """Each prompt's vector, float32[H], after success. Raises ValueError if one is missing."""
        vectors = [job.assembler.embedding for job in self._jobs]
        if not all(vectors):
            raise ValueError("a job ended without its embedding")
        return vectors

    @property
    def outcome(self) -> Outcome:
        """Token counts, valid after the last delta."""
        assemblers = [job.assembler for job in self._jobs]
        return Outcome(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(one.num_tokens for one in assemblers),
            cached_tokens=sum(one.cached_tokens for one in assemblers),
            reasoning_tokens=assemblers[0].num_reasoning_tokens,  # a chat has one job
            accepted_drafts=sum(one.accepted_drafts for one in assemblers),
            rejected_drafts=sum(one.rejected_drafts for one in assemblers),
        )


class _MergedStream:
    def __init__(self, jobs: Sequence[JobStream]) -> None:
        self._ready: asyncio.Queue[list[ChoiceDelta] | Exception | None] = asyncio.Queue(MAX_AHEAD)
        self._num_open = len(jobs)
        self._error: Exception | None = None
        self._pumps = [asyncio.create_task(self._pump(job)) for job in jobs]

    def __aiter__(self) -> _MergedStream:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        deltas: list[ChoiceDelta] = []
        while self._num_open and self._error is None and not (deltas and self._ready.empty()):
            ready = await self._ready.get()
            if ready is None:
                self._num_open -= 1
            elif isinstance(ready, list):
                deltas += ready
            else:
                self._error = ready
        if deltas:
            return deltas
        raise self._error or StopAsyncIteration

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    async def _pump(self, job: JobStream) -> None:
        try:
            async for deltas in job:
                await self._ready.put(deltas)
            await self._ready.put(None)
        except Exception as error:
            await self._ready.put(error)

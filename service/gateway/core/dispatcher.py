"""Submits the jobs of accepted requests, follows their events and cancels jobs that are no longer needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from service.config.settings import Settings
from service.errors import EndReason, RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.back_pressure import BackPressure, NoRoom
from service.gateway.core.queue_writes import BackgroundWrites, storage_limits
from service.gateway.core.refusals import failure, storage_refusal, unavailable
from service.gateway.core.response_assembler import ResponseAssembler
from service.gateway.core.response_stream import JobStream, ResponseStream
from service.gateway.core.served_model import ServedModel
from service.gateway.core.spans import begin_generation, end_generation
from service.observability.logs import fields
from service.observability.metrics import GatewayMetrics, RequestTimer
from service.observability.tracing import NO_TRACING, Tracing
from service.queue.interface import GatewayQueue, QueueFull, QueueUnavailable
from service.queue.messages import Cancel, Job
from service.queue.records import StorageFull

log = logging.getLogger("quire.gateway")

CLOSE_TIMEOUT_S = 2.0
LOOKS_PER_GRACE, MARKS_PER_GRACE, NUM_MISSING_MARKS = 4, 5, 2


async def read_to_end(stream: ResponseStream) -> None:
    async for _ in stream:
        pass


Reader = Callable[[ResponseStream], Coroutine[Any, Any, None]]
"""Consumes a response that has no client."""


class RequestDispatcher:
    def __init__(
        self,
        model: ServedModel,
        queue: GatewayQueue,
        pressure: BackPressure,
        metrics: GatewayMetrics,
        settings: Settings,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._model = model
        self._queue = queue
        self._pressure = pressure
        self._metrics = metrics
        self._tracing = tracing
        self._open: set[_Scope] = set()
        self._grace_s = settings.resume_grace  # how long a resumable request runs on without a client
        self._limits = storage_limits(settings)
        self._keepers: set[asyncio.Task[None]] = set()
        self.background = BackgroundWrites()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def open(self, accepted: AcceptedRequest, *, is_shared: bool = False) -> AsyncIterator[ResponseStream]:
        """Submit the jobs. Leaving the context before they end cancels them.

        With `is_shared`, jobs continue if this gateway stops or loses the queue. Raises RequestError: 429 or 503 for a
        refused job or a closing gateway, 504 past the deadline.
        """
        scope = _Scope(asyncio.timeout(accepted.timeout_s), owns_jobs=True, is_shared=is_shared)
        async with self._opened(accepted, scope) as stream:
            yield stream

    @asynccontextmanager
    async def view(self, accepted: AcceptedRequest) -> AsyncIterator[ResponseStream]:
        """Read a submitted request's response from its beginning; leaving cancels nothing.

        A resumable request counts as watched meanwhile. Raises RequestError like `open`.
        """
        watching = asyncio.create_task(self._watch(accepted)) if accepted.request.resumable else None
        try:
            scope = _Scope(asyncio.timeout(accepted.timeout_s), owns_jobs=False)
            async with self._opened(accepted, scope) as stream:
                yield stream
        finally:
            if watching is not None:
                watching.cancel()
                self._mark_last(accepted)

    async def keep(self, accepted: AcceptedRequest, read: Reader = read_to_end) -> None:
        """Submit the jobs and follow them without a client; return once they are queued.

        A background request runs to its end, any other until it was unwatched for `resume_grace` seconds. Raises
        RequestError.
        """
        submitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        submitted.add_done_callback(asyncio.Future.exception)  # retrieves the exception even if the client has left
        task = asyncio.create_task(self._keep(accepted, submitted, read))
        self._keepers.add(task)
        task.add_done_callback(self._keepers.discard)
        await asyncio.wait({submitted})
        submitted.result()

    async def _keep(self, accepted: AcceptedRequest, submitted: asyncio.Future[None], read: Reader) -> None:
        scope = _Scope(asyncio.timeout(accepted.timeout_s), owns_jobs=True, is_kept=True)
        patience = None
        try:
            async with self._opened(accepted, scope) as stream:
                if accepted.request.resumable:
                    await self._mark(accepted)
                    patience = asyncio.create_task(self._end_unwatched(accepted, scope))
                submitted.set_result(None)
                await read(stream)
        except RequestError as error:
            if not submitted.done():
                submitted.set_exception(error)
        except Exception:
            log.exception("a request without a client failed %s", fields(request=accepted.request_id))
        finally:
            if patience is not None:
                patience.cancel()
            if not submitted.done():
                submitted.set_exception(unavailable())

    async def _end_unwatched(self, accepted: AcceptedRequest, scope: _Scope) -> None:
        """End the scope after NUM_MISSING_MARKS missing marks: one may get lost, or expire early by Redis' clock."""
        num_missing = 0
        while num_missing < NUM_MISSING_MARKS:
            await asyncio.sleep(self._grace_s / LOOKS_PER_GRACE)
            try:
                is_watched = await self._queue.requests.is_watched(accepted.request_id)
            except QueueUnavailable:
                is_watched = True
            num_missing = 0 if is_watched else num_missing + 1
        scope.end(EndReason.CANCELLED)

    async def _watch(self, accepted: AcceptedRequest) -> None:
        while True:
            is_marked = await self._mark(accepted)
            await asyncio.sleep(self._grace_s / MARKS_PER_GRACE if is_marked else min(1.0, self._grace_s / 10))

    async def _mark(self, accepted: AcceptedRequest) -> bool:
        try:
            await self._queue.requests.mark_watched(accepted.request_id, self._grace_s)
        except QueueUnavailable:
            log.warning("request not marked as watched %s", fields(request=accepted.request_id))
            return False
        return True

    def _mark_last(self, accepted: AcceptedRequest) -> None:
        mark = partial(self._queue.requests.mark_watched, accepted.request_id, self._grace_s)
        self.background.repeat(mark, "request not marked as watched", self._grace_s, request=accepted.request_id)

    @asynccontextmanager
    async def _opened(self, accepted: AcceptedRequest, scope: _Scope) -> AsyncIterator[ResponseStream]:
        numbers = range(len(accepted.job_ids))
        jobs = [self._follow(accepted, number, is_queued=not scope.owns_jobs) for number in numbers]
        stream = ResponseStream(jobs, sum(accepted.num_prompt_tokens))
        self._open.add(scope)
        span = begin_generation(self._tracing if scope.owns_jobs else NO_TRACING, accepted)
        reason, is_kept, refused = EndReason.CANCELLED, scope.is_kept or scope.is_shared, None
        try:
            async with scope.timeout:
                if scope.owns_jobs:
                    await self._submit(accepted, jobs, span.traceparent, scope)
                yield stream
        except NoRoom as error:
            is_kept, refused = True, error.code  # `_withdraw` cancels the accepted jobs
            raise
        except RequestError as error:
            is_kept, refused = False, error.code  # a job failed
            raise
        except QueueUnavailable:
            # The jobs may have been queued.
            reason = EndReason.INTERNAL
            raise unavailable() from None
        except TimeoutError:
            if not scope.timeout.expired():
                raise
            reason, is_kept = scope.reason, is_kept and scope.reason is EndReason.SHUTDOWN
            raise failure(reason) from None
        finally:
            self._open.discard(scope)
            stream.leave(reason, jobs_go_on=is_kept or not scope.owns_jobs)
            if self._tracing.is_on and scope.owns_jobs:
                end_generation(span, stream, reason, refused)
            self.background.spawn(stream.close())

    async def _submit(
        self, accepted: AcceptedRequest, job_streams: Sequence[JobStream], traceparent: str | None, scope: _Scope
    ) -> None:
        """Raises NoRoom; RequestError (429, 503) if storage is full; QueueUnavailable."""
        by_id = {job_stream.job_id: job_stream for job_stream in job_streams}
        for number, job in enumerate(accepted.jobs):
            job_stream = by_id[job.job_id]
            job_stream.note_submitting()
            try:
                traced = job if traceparent is None else replace(job, traceparent=traceparent)
                record = None if number else accepted.record
                await self._queue.submit(traced, self._pressure.bounds, record, self._limits)
            except (QueueFull, StorageFull) as full:
                job_stream.note_refused()
                is_new = len(accepted.jobs) == len(job_streams)
                if is_new and not scope.is_shared:  # else a gateway retries it
                    self.background.spawn(self._withdraw(accepted, number))
                if isinstance(full, StorageFull):
                    raise storage_refusal(full) from None
                raise self._pressure.refused(accepted.tenant, full) from None
            self._pressure.accepted(accepted.tenant)
            job_stream.note_accepted(self._track(job))

    async def _withdraw(self, accepted: AcceptedRequest, num_accepted: int) -> None:
        """Drop a refused request's record, so that a flood leaves none, and only then cancel its jobs."""
        if num_accepted == 0 and accepted.idempotency is None:
            return  # no record was written

        def forget() -> Awaitable[None]:
            # Keep the record if a concurrent request with the same key was accepted.
            unless_there = None if num_accepted else accepted.request_id
            return self._queue.requests.drop_request(
                accepted.request_id, accepted.tenant, accepted.idempotency, unless_there
            )

        if await self.background.until_known(forget, "request not forgotten", request=accepted.request_id):
            for job in accepted.jobs[:num_accepted]:
                self._cancel(Cancel(job_id=job.job_id, reason=EndReason.CANCELLED))

    def _track(self, job: Job) -> RequestTimer:
        return self._metrics.track_request(len(job.prompt) // 4, job.sampling.max_tokens, job.sampling.n)

    def _follow(self, accepted: AcceptedRequest, number: int, *, is_queued: bool) -> JobStream:
        job_id = accepted.job_ids[number]
        first_index = number * accepted.request.sampling.n
        assembler = ResponseAssembler(accepted.request, self._model, first_index, accepted.reasoning)
        return JobStream(job_id, self._queue.follow(job_id), assembler, self._cancel, is_queued)

    def release_kept(self) -> None:
        """Leave requests that outlive their clients to other gateways."""
        for scope in [scope for scope in self._open if scope.is_kept]:
            scope.end(EndReason.SHUTDOWN)

    def end_all(self) -> None:
        for scope in self._open:
            scope.end(EndReason.SHUTDOWN)

    async def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT_S for pending cancels."""
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=CLOSE_TIMEOUT_S)
        await self.background.close()

    def _cancel(self, cancel: Cancel) -> None:
        # In its own task: the request's task may itself be cancelled.
        self.background.repeat(lambda: self._queue.cancel(cancel), "cancel not sent", job=cancel.job_id)


@dataclass(eq=False)
class _Scope:
    """The deadline of an open request, and whether its jobs survive it."""

    timeout: asyncio.Timeout
    owns_jobs: bool  # leaving cancels the jobs
    is_kept: bool = False  # runs without a client
    is_shared: bool = False  # any gateway can continue it
    reason: EndReason = EndReason.DEADLINE

    def end(self, reason: EndReason) -> None:
        self.reason = reason
        self.timeout.reschedule(asyncio.get_running_loop().time())

"""Runs one batch's requests, with retries, until their results are stored."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

from service.errors import EndReason, RequestError
from service.gateway.batches.input_file import InputFile
from service.gateway.batches.lines import MAX_ANSWER_BYTES, RequestLine, answer_line, line_name, read_line, refusal_line
from service.gateway.batches.requests import BatchRequests, Interrupted, NotStored, RanLate, RanPastOwnTimeout
from service.gateway.batches.turns import LineSlots
from service.gateway.core.service import InferenceService
from service.gateway.openai.json_objects import Json
from service.observability.logs import log_context
from service.queue.interface import QueueUnavailable
from service.queue.records import ANSWERED_BADLY, ANSWERED_WELL, Batch, BatchStatus, StorageFull

HEARTBEAT_S = 1.0
RETRY_S = 2.0
RETRYABLE = frozenset({429, 503, 504})
"""Errors that are retried while the batch lasts, since they do not depend on the request.

A 504 is final if the line sets its own `timeout`, or after MAX_LATE timeouts of responses that had begun.
"""
MAX_LATE = 3


@dataclass
class _Line:
    """A line without a result."""

    number: int
    attempt: int = 0
    num_late: int = 0


@dataclass(frozen=True)
class _LineResult:
    """A line's result, for the output or error file."""

    answer: bytes
    mark: bytes
    key: str  # the request's idempotency key
    request_id: str | None = None  # set if the request was answered


class BatchProgress:
    """Runs a batch that this gateway leases. Keeps one byte per finished line."""

    def __init__(self, service: InferenceService, batch: Batch, input_file: InputFile, slots: LineSlots) -> None:
        self._service = service
        self._queue = service.queue
        self._requests = BatchRequests(service)
        self._batch = batch
        self._input = input_file
        self._slots = slots
        self._marks = bytearray()
        self._next = 0
        self._retries: deque[_Line] = deque()
        self._num_in_flight = 0
        self._changed = asyncio.Event()
        self._pause_until_s = 0.0
        self.end: BatchStatus | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of (successful, failed) lines."""
        return self._marks.count(ANSWERED_WELL), self._marks.count(ANSWERED_BADLY)

    async def run(self) -> BatchStatus:
        """Run until the batch is completed, cancelled, expired, or FAILED because its tenant's storage is full.

        Raises BadInput if the input file was deleted, QueueUnavailable.
        """
        marks = await self._queue.batches.line_marks(self._batch.batch_id)
        self._marks = bytearray(marks.ljust(len(self._input.index), b"\0"))
        end = asyncio.create_task(self._wait_for_end())
        work = asyncio.create_task(self._run_all())
        try:
            await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else end.result()
        except StorageFull:
            return BatchStatus.FAILED
        finally:
            end.cancel()
            work.cancel()
            await asyncio.gather(work, end, return_exceptions=True)

    async def _wait_for_end(self) -> BatchStatus:
        """Wait for cancellation or expiry, storing the counts meanwhile."""
        stored = (0, 0)
        while True:
            with suppress(QueueUnavailable):
                if await self._queue.batches.is_batch_cancelled(self._batch.batch_id):
                    return BatchStatus.CANCELLED
                if await self._queue.now_s() >= self._batch.expires_s:
                    return BatchStatus.EXPIRED
                if self.counts != stored:
                    stored = self.counts
                    await self._queue.batches.put_batch(
                        replace(self._batch, num_completed=stored[0], num_failed=stored[1])
                    )
            await asyncio.sleep(HEARTBEAT_S)

    async def _run_all(self) -> BatchStatus:
        try:
            async with asyncio.TaskGroup() as tasks:
                while (line := await self._next_line()) is not None:
                    row = await self._row(line)
                    await self._slots.acquire(len(row))
                    self._num_in_flight += 1
                    tasks.create_task(self._answer(line, row))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return BatchStatus.COMPLETED

    async def _next_line(self) -> _Line | None:
        loop = asyncio.get_running_loop()
        while True:
            pause_s = self._pause_until_s - loop.time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            elif self._retries:
                return self._retries.popleft()
            elif (number := self._marks.find(b"\0", self._next)) >= 0:
                self._next = number + 1
                return _Line(number)
            elif not self._num_in_flight:
                return None
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _row(self, line: _Line) -> bytes:
        while True:
            try:
                return await self._input.row(line.number)
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _answer(self, line: _Line, row: bytes) -> None:
        try:
            with log_context(batch=self._batch.batch_id, line=line.number):
                await self._store_result(line, await self._run_line(line, read_line(row)))
        finally:
            self._num_in_flight -= 1
            self._slots.release(len(row))
            self._changed.set()

    async def _store_result(self, line: _Line, result: _LineResult | None) -> None:
        """Store a line's result. Raises StorageFull."""
        if result is None:
            return
        await self._store_line(line.number, result.answer, result.mark)
        if result.request_id is not None:
            await self._requests.forget(result.request_id, self._batch.tenant, result.key)

    async def _run_line(self, line: _Line, request: RequestLine) -> _LineResult | None:
        """Run a line. Return None if it must be retried."""
        name = line_name(self._batch, line.number)
        key = f"{name}/{line.attempt}"
        try:
            request_id, answer = await self._ask(key, request)
        except QueueUnavailable:
            self._retry_later(line, RETRY_S)
            return None
        except RequestError as error:
            if error.status not in RETRYABLE or isinstance(error, RanPastOwnTimeout | NotStored):
                return _LineResult(refusal_line(name, request.custom_id, error), ANSWERED_BADLY, key)
            line.num_late += isinstance(error, RanLate)
            if line.num_late == MAX_LATE:
                message = f"{error.message} So it did each of the {line.num_late} times that it was asked."
                return _LineResult(
                    refusal_line(name, request.custom_id, replace(error, message=message)), ANSWERED_BADLY, key
                )
            # with the old key it would time out again, or stay lost
            line.attempt += error.status == 504 or error.code == EndReason.LOST
            self._retry_later(line, error.retry_after_s or RETRY_S)
            return None
        result = answer_line(name, request.custom_id, request_id, answer)
        if len(result) <= MAX_ANSWER_BYTES:
            return _LineResult(result, ANSWERED_WELL, key, request_id)
        message = f"The answer is longer than {MAX_ANSWER_BYTES} bytes (ask for fewer tokens or log-probabilities)."
        refused = RequestError(400, message, code="answer_too_long")
        return _LineResult(refusal_line(name, request.custom_id, refused), ANSWERED_BADLY, key, request_id)

    async def _ask(self, key: str, request: RequestLine) -> tuple[str, Json]:
        """Get the response; cancel the request with its batch. Raises RequestError, QueueUnavailable."""
        batch = self._batch
        try:
            return await self._requests.answer(batch.endpoint, bytes(request.body), batch.tenant, key)
        except Interrupted as interrupted:
            if await self._queue.batches.is_batch_cancelled(batch.batch_id):
                await self._service.cancel(interrupted.accepted)
            raise

    def _retry_later(self, line: _Line, wait_s: float) -> None:
        """Retry a line. The whole batch pauses: other lines would be refused too."""
        self._retries.append(line)
        self._pause_until_s = max(self._pause_until_s, asyncio.get_running_loop().time() + wait_s)

    async def _store_line(self, number: int, answer: bytes, mark: bytes) -> None:
        """Store a line, retrying. Raises StorageFull if the tenant's storage is full."""
        while True:
            try:
                await self._queue.batches.put_line(self._batch, number, answer, mark, self._service.storage)
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)
            except StorageFull as full:
                if full.of_tenant:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._marks[number : number + 1] = mark
                return

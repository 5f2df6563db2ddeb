"""The requests of one batch: each is asked, again where that may help, until its answer is stored."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

from service.errors import EndReason, RequestError
from service.gateway.batches.input_file import InputFile
from service.gateway.batches.lines import (
    MAX_ANSWER_BYTES,
    AskedLine,
    answer_line,
    line_name,
    read_line,
    refusal_line,
)
from service.gateway.batches.requests import BatchRequests, Interrupted, NotStored, RanLate, RanPastOwnTimeout
from service.gateway.batches.turns import LineSlots
from service.gateway.core.service import InferenceService
from service.observability.logs import log_context
from service.queue.batches import ANSWERED_BADLY, ANSWERED_WELL, Batch, BatchStatus
from service.queue.interface import QueueUnavailable
from service.queue.storage import StorageFull

BEAT_S = 1.0
RETRY_S = 2.0
AGAIN = frozenset({429, 503, 504})
"""Refusals that say nothing about the request itself: it is asked again as long as its batch lasts. A 504 does say
something where the line names its own `timeout`, or has begun to answer and came to no end, MAX_LATE times."""
MAX_LATE = 3


@dataclass
class _Line:
    """A line that has no answer yet."""

    number: int
    attempt: int = 0
    num_late: int = 0


@dataclass(frozen=True)
class _Told:
    """What the file says of a line."""

    answer: bytes
    mark: bytes
    key: str  # under which the line was asked
    request_id: str | None = None  # where it was answered


class Progress:
    """Of a batch that this gateway holds. Per line that is done it keeps one byte."""

    def __init__(self, service: InferenceService, batch: Batch, input_file: InputFile, slots: LineSlots) -> None:
        self._service = service
        self._queue = service.queue
        self._requests = BatchRequests(service)
        self._batch = batch
        self._input = input_file
        self._slots = slots
        self._marks = bytearray()
        self._next = 0
        self._again: deque[_Line] = deque()
        self._num_in_flight = 0
        self._changed = asyncio.Event()
        self._pause_until_s = 0.0
        self.end: BatchStatus | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """How many lines were answered well, and how many were not."""
        return self._marks.count(ANSWERED_WELL), self._marks.count(ANSWERED_BADLY)

    async def run(self) -> BatchStatus:
        """How it ended: all done, cancelled, out of time, or (FAILED) out of the room that its tenant has. Raises
        BadInput where the input file is gone, QueueUnavailable."""
        marks = await self._queue.line_marks(self._batch.batch_id)
        self._marks = bytearray(marks.ljust(len(self._input.index), b"\0"))
        end = asyncio.create_task(self._end())
        work = asyncio.create_task(self._ask_all())
        try:
            await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else end.result()
        except StorageFull:
            return BatchStatus.FAILED
        finally:
            end.cancel()
            work.cancel()
            await asyncio.gather(work, end, return_exceptions=True)

    async def _end(self) -> BatchStatus:
        """Waits until the batch must end before it is done; tells how far it is meanwhile."""
        told = (0, 0)
        while True:
            with suppress(QueueUnavailable):
                if await self._queue.is_batch_cancelled(self._batch.batch_id):
                    return BatchStatus.CANCELLED
                if await self._queue.now_s() >= self._batch.expires_s:
                    return BatchStatus.EXPIRED
                if self.counts != told:
                    told = self.counts
                    await self._queue.put_batch(replace(self._batch, num_completed=told[0], num_failed=told[1]))
            await asyncio.sleep(BEAT_S)

    async def _ask_all(self) -> BatchStatus:
        """Raises StorageFull, and what `_row` does."""
        try:
            async with asyncio.TaskGroup() as asked:
                while (line := await self._take_line()) is not None:
                    row = await self._row(line)
                    await self._slots.take(len(row))
                    self._num_in_flight += 1
                    asked.create_task(self._answer(line, row))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return BatchStatus.COMPLETED

    async def _take_line(self) -> _Line | None:
        """The next line to ask; None once all are answered."""
        loop = asyncio.get_running_loop()
        while True:
            pause_s = self._pause_until_s - loop.time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            elif self._again:
                return self._again.popleft()
            elif (number := self._marks.find(b"\0", self._next)) >= 0:
                self._next = number + 1
                return _Line(number)
            elif not self._num_in_flight:
                return None
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _row(self, line: _Line) -> bytes:
        """Raises BadInput where the input file is gone."""
        while True:
            try:
                return await self._input.row(line.number)
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _answer(self, line: _Line, row: bytes) -> None:
        try:
            with log_context(batch=self._batch.batch_id, line=line.number):
                await self._settle(line, await self._asked(line, read_line(row)))
        finally:
            self._num_in_flight -= 1
            self._slots.give_back(len(row))
            self._changed.set()

    async def _settle(self, line: _Line, told: _Told | None) -> None:
        """Raises StorageFull."""
        if told is None:
            return
        await self._put(line.number, told.answer, told.mark)
        if told.request_id is not None:
            await self._requests.forget(told.request_id, self._batch.tenant, told.key)

    async def _asked(self, line: _Line, asked: AskedLine) -> _Told | None:
        """None: the line is to be asked again."""
        name = line_name(self._batch, line.number)
        key = f"{name}/{line.attempt}"
        try:
            request_id, answer = await self._ask(key, asked)
        except QueueUnavailable:
            self._ask_again(line, RETRY_S)
            return None
        except RequestError as error:
            if error.status not in AGAIN or isinstance(error, RanPastOwnTimeout | NotStored):
                return _Told(refusal_line(name, asked.custom_id, error), ANSWERED_BADLY, key)
            line.num_late += isinstance(error, RanLate)
            if line.num_late == MAX_LATE:
                message = f"{error.message} So it did each of the {line.num_late} times that it was asked."
                return _Told(refusal_line(name, asked.custom_id, replace(error, message=message)), ANSWERED_BADLY, key)
            # Under its old key it would be late again, or lost.
            line.attempt += error.status == 504 or error.code == EndReason.LOST
            self._ask_again(line, error.retry_after_s or RETRY_S)
            return None
        told = answer_line(name, asked.custom_id, request_id, answer)
        if len(told) <= MAX_ANSWER_BYTES:
            return _Told(told, ANSWERED_WELL, key, request_id)
        message = f"The answer is longer than {MAX_ANSWER_BYTES} bytes (ask for fewer tokens or log-probabilities)."
        refused = RequestError(400, message, code="answer_too_long")
        return _Told(refusal_line(name, asked.custom_id, refused), ANSWERED_BADLY, key, request_id)

    async def _ask(self, key: str, asked: AskedLine):
        """Raises RequestError, QueueUnavailable."""
        batch = self._batch
        try:
            return await self._requests.answer(batch.endpoint, bytes(asked.body), batch.tenant, key)
        except Interrupted as interrupted:
            if await self._queue.is_batch_cancelled(batch.batch_id):
                await self._service.cancel(interrupted.accepted)
            raise

    def _ask_again(self, line: _Line, wait_s: float) -> None:
        """Not this line alone waits: the others of its batch would fare no better."""
        self._again.append(line)
        self._pause_until_s = max(self._pause_until_s, asyncio.get_running_loop().time() + wait_s)

    async def _put(self, number: int, answer: bytes, mark: bytes) -> None:
        """Raises StorageFull where the tenant has stored all that it may."""
        while True:
            try:
                await self._queue.put_line(self._batch, number, answer, mark, self._service.storage)
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)
            except StorageFull as full:
                if full.of_tenant:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._marks[number : number + 1] = mark
                return

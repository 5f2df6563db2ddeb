"""Carries batches out. Every gateway looks for open ones; who holds one works on it until it is done or it dies.

What is done is in the queue: an answered line is never asked again, and a line that was under way when its gateway died
is found by the next one under its Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from service.errors import EndReason, RequestError
from service.gateway.batches.files import OUTPUT, store
from service.gateway.batches.lines import (
    BadInput,
    BatchLine,
    answer_line,
    is_success,
    read_lines,
    refusal_line,
    undone_line,
)
from service.gateway.batches.requests import BatchRequests, Interrupted, RanLate
from service.gateway.hall.hall import Hall, incident
from service.logs import about, fields
from service.wire.batches import Batch, BatchError, BatchStatus
from service.wire.broker import BrokerUnavailable

log = logging.getLogger("quire.batches")

LOOK_EVERY_S = 5.0
HOLD_S = 15.0
BEAT_S = 1.0
MAX_IN_FLIGHT = 64
"""Requests of one batch at once: enough to fill a machine that is idle, few enough to leave again soon."""
RETRY_S = 2.0
AGAIN = frozenset({429, 503, 504})
"""Refusals that say nothing about the request itself: it is asked again as long as its batch lasts. A 504 does say
something where the line names its own `timeout`, or has begun to answer and came to no end, MAX_LATE times."""
MAX_LATE = 3


class BatchRunner:
    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._broker = hall.broker
        self._holder = secrets.token_hex(8)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def look(self) -> None:
        """There may be something to do now."""
        self._news.set()

    async def run(self) -> None:
        """Until cancelled; what is under way then is left to others."""
        try:
            while True:
                try:
                    await self._take_up()
                except BrokerUnavailable as error:
                    log.warning("no batches to be had: %s", error)
                except Exception as error:
                    incident(error, "batch")
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._news.wait()
                self._news.clear()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _take_up(self) -> None:
        for batch_id in await self._broker.open_batches():
            if batch_id not in self._running and await self._broker.hold_batch(batch_id, self._holder, HOLD_S):
                task = asyncio.create_task(self._carry(batch_id))
                self._running[batch_id] = task
                task.add_done_callback(lambda _, batch_id=batch_id: self._running.pop(batch_id))

    async def _carry(self, batch_id: str) -> None:
        """One batch to its end, or until it is another's."""
        work = asyncio.create_task(self._work(batch_id))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=BEAT_S)
                with suppress(BrokerUnavailable):
                    if not await self._broker.hold_batch(batch_id, self._holder, HOLD_S):
                        return
            work.result()
        except BrokerUnavailable as error:
            log.warning("a batch has to wait %s: %s", fields(batch=batch_id), error)
        except Exception as error:
            await self._give_up(batch_id, incident(error, "batch"))
        finally:
            work.cancel()

    async def _give_up(self, batch_id: str, told: RequestError) -> None:
        """A bug of ours would be met again at every try."""
        with suppress(BrokerUnavailable):
            batch = await self._broker.batch(batch_id)
            if batch is not None and batch.is_open:
                errors = (BatchError(code=told.code, message=told.message),)
                await self._become(batch, BatchStatus.FAILED, errors=errors)

    async def _work(self, batch_id: str) -> None:
        batch = await self._broker.batch(batch_id)
        if batch is None or not batch.is_open:
            return
        try:
            data = await self._broker.file_data(batch.input_file_id)
            if await self._broker.file(batch.input_file_id) is None:
                raise BadInput((BatchError(code="file_not_found", message="The input file is not there any more."),))
            lines = await asyncio.get_running_loop().run_in_executor(self._hall.pool, read_lines, data, batch.endpoint)
        except BadInput as bad:
            await self._become(batch, BatchStatus.FAILED, errors=bad.errors)
            return
        batch = await self._become(batch, BatchStatus.IN_PROGRESS, num_total=len(lines))
        end = await _Progress(self._hall, batch, lines).run()
        batch = await self._become(batch, BatchStatus.FINALIZING)
        await self._finish(batch, lines, end)

    async def _finish(self, batch: Batch, lines: Sequence[BatchLine], end: BatchStatus) -> None:
        """The answers as files, in the order of the input."""
        answers = await self._broker.lines(batch.batch_id)
        good, bad = [], []
        for number, line in enumerate(lines):
            answer = answers.get(number)
            if answer is None:
                words = ("batch_cancelled", "The batch was cancelled.")
                if end is BatchStatus.EXPIRED:
                    words = ("batch_expired", "The batch ran past its completion window.")
                answer = undone_line(_name(batch, number), line.custom_id, *words)
            (good if is_success(answer) else bad).append(answer)
        files = {}
        for kind, found in (("output", good), ("error", bad)):
            if found:
                name = f"{batch.batch_id}_{kind}.jsonl"
                data = b"".join(each + b"\n" for each in found)
                files[f"{kind}_file_id"] = (await store(self._broker, batch.tenant, name, OUTPUT, data)).file_id
        await self._become(batch, end, num_completed=len(good), num_failed=len(bad), **files)

    async def _become(self, batch: Batch, status: BatchStatus, **changes) -> Batch:
        at_s = {**batch.at_s, status.value: await self._broker.now_s()}
        batch = replace(batch, status=status, at_s=at_s, **changes)
        await self._broker.put_batch(batch)
        log.info("batch %s", fields(batch=batch.batch_id, status=status, requests=batch.num_total))
        return batch


class _Progress:
    """The requests of one batch, as many at once as may be."""

    def __init__(self, hall: Hall, batch: Batch, lines: Sequence[BatchLine]):
        self._hall = hall
        self._broker = hall.broker
        self._requests = BatchRequests(hall)
        self._batch = batch
        self._lines = lines
        self._num_completed = self._num_failed = 0

    async def run(self) -> BatchStatus:
        """How it ended: all done, cancelled, or out of time."""
        done = await self._broker.lines(self._batch.batch_id)
        for line in done.values():
            self._count(line)
        left = iter([(number, line) for number, line in enumerate(self._lines) if number not in done])
        end = asyncio.create_task(self._end())
        work = asyncio.create_task(self._ask_all(left))
        try:
            await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return end.result()
            work.result()
            return BatchStatus.COMPLETED
        finally:
            end.cancel()
            work.cancel()
            await asyncio.gather(work, end, return_exceptions=True)

    async def _ask_all(self, left: Iterator[tuple[int, BatchLine]]) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(MAX_IN_FLIGHT):
                workers.create_task(self._ask_each(left))

    async def _end(self) -> BatchStatus:
        """Waits until the batch must end before it is done; tells how far it is meanwhile."""
        told = (0, 0)
        while True:
            with suppress(BrokerUnavailable):
                if await self._broker.is_batch_cancelled(self._batch.batch_id):
                    return BatchStatus.CANCELLED
                if await self._broker.now_s() >= self._batch.expires_s:
                    return BatchStatus.EXPIRED
                counts = (self._num_completed, self._num_failed)
                if counts != told:
                    told = counts
                    await self._broker.put_batch(replace(self._batch, num_completed=counts[0], num_failed=counts[1]))
            await asyncio.sleep(BEAT_S)

    async def _ask_each(self, left: Iterator[tuple[int, BatchLine]]) -> None:
        for number, line in left:
            answer = await self._answer(number, line)
            await self._put(number, answer)
            self._count(answer)

    async def _put(self, number: int, answer: bytes) -> None:
        while True:
            try:
                return await self._broker.put_line(self._batch.batch_id, number, answer)
            except BrokerUnavailable:
                await asyncio.sleep(RETRY_S)

    def _count(self, answer: bytes) -> None:
        if is_success(answer):
            self._num_completed += 1
        else:
            self._num_failed += 1

    async def _answer(self, number: int, line: BatchLine) -> bytes:
        name = _name(self._batch, number)
        with about(batch=self._batch.batch_id, line=number):
            return await self._answer_line(name, line)

    async def _answer_line(self, name: str, line: BatchLine) -> bytes:
        attempt = num_late = 0
        while True:
            try:
                return await self._ask(f"{name}/{attempt}", name, line)
            except BrokerUnavailable:
                await asyncio.sleep(RETRY_S)
            except RequestError as error:
                if error.status not in AGAIN or (error.status == 504 and line.body.get("timeout") is not None):
                    return refusal_line(name, line.custom_id, error)
                num_late += isinstance(error, RanLate)
                if num_late == MAX_LATE:
                    message = f"{error.message} So it did each of the {num_late} times that it was asked."
                    return refusal_line(name, line.custom_id, replace(error, message=message))
                # Under its old key it would be late again, or lost.
                attempt += error.status == 504 or error.code == EndReason.LOST
                await asyncio.sleep(error.retry_after_s or RETRY_S)

    async def _ask(self, key: str, name: str, line: BatchLine) -> bytes:
        """Raises RequestError, BrokerUnavailable."""
        batch = self._batch
        try:
            request_id, answer = await self._requests.answer(batch.endpoint, line.body, batch.tenant, key)
        except Interrupted as interrupted:
            if await self._broker.is_batch_cancelled(batch.batch_id):
                await self._hall.cancel(interrupted.ticket)
            raise
        return answer_line(name, line.custom_id, request_id, answer)


def _name(batch: Batch, number: int) -> str:
    return f"{batch.batch_id}_{number}"

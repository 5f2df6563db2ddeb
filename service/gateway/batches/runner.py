"""Runs batches. Each gateway polls for open batches and holds a lease on each batch it runs.

All state is in the queue: an answered line is never run again, and a dead gateway's requests are found by their
Idempotency-Keys. For a few batches, memory holds line offsets, one byte per finished line, and the lines in flight.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from service.errors import STORAGE_QUOTA_EXCEEDED, RequestError
from service.gateway.batches.finish import write_result_files
from service.gateway.batches.input_file import InputFile, LineIndex, LineScanner, scan_file
from service.gateway.batches.lines import NOT_RUN_LINE_BYTES, BadInput
from service.gateway.batches.progress import BatchProgress
from service.gateway.batches.turns import BatchTurns, LineSlots
from service.gateway.core.refusals import incident, storage_refusal
from service.gateway.core.service import InferenceService
from service.observability.logs import fields
from service.queue.interface import QueueUnavailable
from service.queue.records import Batch, BatchError, BatchStatus, OpenBatch, StorageFull

log = logging.getLogger("quire.batches")

POLL_INTERVAL_S = 5.0
LEASE_S = 15.0
HEARTBEAT_S = 1.0
NO_MEMORY_RETRY_S = 30.0
"""Retry delay of a batch that the queue has no memory for."""


@dataclass(frozen=True)
class _RunningBatch:
    batch: OpenBatch
    task: asyncio.Task[None]


class BatchRunner:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._queue = service.queue
        self._holder = secrets.token_hex(8)
        self._running: dict[str, _RunningBatch] = {}
        self._turns = BatchTurns()
        self._slots = LineSlots()
        self._reading = asyncio.Lock()  # only one file is read at a time
        self._not_before_s: dict[str, float] = {}
        self._wake_up = asyncio.Event()

    def wake(self) -> None:
        self._wake_up.set()

    async def run(self) -> None:
        """Run until cancelled, which leaves running batches to other gateways."""
        try:
            while True:
                try:
                    await self._start_batches()
                except QueueUnavailable as error:
                    log.warning("no batches fetched: %s", error)
                except Exception as error:
                    incident(error, "batch")
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_INTERVAL_S):
                        await self._wake_up.wait()
                self._wake_up.clear()
        finally:
            tasks = [work.task for work in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_batches(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._not_before_s = {name: at_s for name, at_s in self._not_before_s.items() if at_s > now_s}
        skipped = self._running.keys() | self._not_before_s.keys()
        waiting = [batch for batch in await self._queue.batches.open_batches() if batch.batch_id not in skipped]
        tenants = [work.batch.tenant for work in self._running.values()]
        for batch in self._turns.next_batches(waiting, tenants):
            if await self._queue.batches.hold_batch(batch.batch_id, self._holder, LEASE_S):
                self._turns.record_start(batch)
                tenants.append(batch.tenant)
                task = asyncio.create_task(self._run_batch(batch.batch_id))
                self._running[batch.batch_id] = _RunningBatch(batch, task)
                task.add_done_callback(partial(self._on_batch_done, batch.batch_id))

    def _on_batch_done(self, batch_id: str, _: asyncio.Task[None]) -> None:
        del self._running[batch_id]
        self.wake()

    async def _run_batch(self, batch_id: str) -> None:
        work = asyncio.create_task(self._process(batch_id))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=HEARTBEAT_S)
                with suppress(QueueUnavailable):
                    if not await self._queue.batches.hold_batch(batch_id, self._holder, LEASE_S):
                        return
            work.result()
        except (QueueUnavailable, StorageFull) as error:
            log.warning("a batch has to wait %s: %r", fields(batch=batch_id), error)
            wait_s = NO_MEMORY_RETRY_S if isinstance(error, StorageFull) else POLL_INTERVAL_S
            self._not_before_s[batch_id] = asyncio.get_running_loop().time() + wait_s
        except Exception as error:
            await self._fail_on_bug(batch_id, incident(error, "batch"))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _fail_on_bug(self, batch_id: str, error: RequestError) -> None:
        """Fail a batch on an internal error, since a retry would hit it again."""
        with suppress(QueueUnavailable):
            batch = await self._queue.batches.get_batch(batch_id)
            if batch is not None and batch.is_open:
                await self._fail(batch, BatchError(code=error.code or error.type, message=error.message))

    async def _process(self, batch_id: str) -> None:
        batch = await self._queue.batches.get_batch(batch_id)
        if batch is None:
            return
        if not batch.is_open:
            await self._queue.batches.put_batch(batch)  # its gateway may have died before removing it from the list
            return
        input_file = InputFile(self._queue.batches, batch.input_file_id, LineIndex())
        try:
            batch, input_file = await self._scan_input(batch)
            if batch.status is not BatchStatus.FINALIZING:
                batch = await self._run_requests(batch, input_file)
        except BadInput as bad:
            if batch.status is not BatchStatus.FINALIZING:
                await self._fail(batch, *bad.errors)
                return
        await self._set_status(
            await write_result_files(self._queue, batch, input_file), batch.ends_as or BatchStatus.FAILED
        )

    async def _scan_input(self, batch: Batch) -> tuple[Batch, InputFile]:
        """Scan the input and reserve space for the results. Raises BadInput, QueueUnavailable, StorageFull."""
        is_new = batch.status is BatchStatus.VALIDATING
        scanner = LineScanner(batch.endpoint, self._service.settings.max_body_bytes, checks=is_new)
        async with self._reading:
            run = partial(self._service.threads.run, batch.tenant)
            await scan_file(self._queue.batches, batch.input_file_id, scanner, run)
        if is_new:
            num_bytes = len(scanner.index) * NOT_RUN_LINE_BYTES + scanner.num_id_bytes
            try:
                await self._queue.batches.reserve_lines(batch, num_bytes, self._service.storage)
            except StorageFull as full:
                if not full.of_tenant:
                    raise
                refusal = storage_refusal(full)
                raise BadInput((BatchError(code=refusal.code or refusal.type, message=refusal.message),)) from None
            batch = await self._set_status(batch, BatchStatus.IN_PROGRESS, num_total=len(scanner.index))
        return batch, InputFile(self._queue.batches, batch.input_file_id, scanner.index)

    async def _run_requests(self, batch: Batch, input_file: InputFile) -> Batch:
        progress = BatchProgress(self._service, batch, input_file, self._slots)
        end = await progress.run()
        num_completed, _ = progress.counts
        errors: tuple[BatchError, ...] = ()
        if end is BatchStatus.FAILED:
            message = "The batch ended early: its tenant has stored all that it may (delete files or responses)."
            errors = (BatchError(code=STORAGE_QUOTA_EXCEEDED, message=message),)
        counts = {"num_completed": num_completed, "num_failed": batch.num_total - num_completed}
        return await self._set_status(batch, BatchStatus.FINALIZING, ends_as=end, errors=errors, **counts)

    async def _fail(self, batch: Batch, *errors: BatchError) -> None:
        await self._queue.batches.drop_lines(batch)
        await self._set_status(batch, BatchStatus.FAILED, errors=errors)

    async def _set_status(self, batch: Batch, status: BatchStatus, **changes: Any) -> Batch:
        at_s = {**batch.at_s, status.value: await self._queue.now_s()}
        batch = replace(batch, status=status, at_s=at_s, **changes)
        await self._queue.batches.put_batch(batch)
        log.info("batch %s", fields(batch=batch.batch_id, status=status, requests=batch.num_total))
        return batch

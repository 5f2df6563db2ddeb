"""Carries batches out. Every gateway looks for open ones; who holds one works on it until it is done or it dies.

What is done is in the queue: an answered line is never asked again, and a line that was under way when its gateway died
is found by the next one under its Idempotency-Key. So is what waits: a gateway has a few batches at once, and of each
where its lines are, a byte for each that is done, and the lines that are under way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from service.errors import STORAGE_QUOTA_EXCEEDED, RequestError
from service.gateway.batches.finish import finish
from service.gateway.batches.input_file import InputFile, LineIndex, LineScanner, scan_file
from service.gateway.batches.lines import UNDONE_BYTES, BadInput
from service.gateway.batches.progress import Progress
from service.gateway.batches.turns import BatchTurns, LineSlots
from service.gateway.core.service import InferenceService, incident
from service.gateway.core.storage import storage_refusal
from service.observability.logs import fields
from service.queue.batches import Batch, BatchError, BatchStatus, OpenBatch
from service.queue.interface import QueueUnavailable
from service.queue.storage import StorageFull

log = logging.getLogger("quire.batches")

LOOK_EVERY_S = 5.0
HOLD_S = 15.0
BEAT_S = 1.0
NO_ROOM_S = 30.0
"""Before a batch is looked at again for which the queue has no memory."""


@dataclass(frozen=True)
class _Work:
    batch: OpenBatch
    task: asyncio.Task[None]


class BatchRunner:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._queue = service.queue
        self._holder = secrets.token_hex(8)
        self._running: dict[str, _Work] = {}
        self._turns = BatchTurns()
        self._slots = LineSlots()
        self._reading = asyncio.Lock()  # one file is read at a time
        self._not_before_s: dict[str, float] = {}
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
                except QueueUnavailable as error:
                    log.warning("no batches to be had: %s", error)
                except Exception as error:
                    incident(error, "batch")
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._news.wait()
                self._news.clear()
        finally:
            tasks = [work.task for work in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_up(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._not_before_s = {name: at_s for name, at_s in self._not_before_s.items() if at_s > now_s}
        skipped = self._running.keys() | self._not_before_s.keys()
        waiting = [batch for batch in await self._queue.open_batches() if batch.batch_id not in skipped]
        tenants = [work.batch.tenant for work in self._running.values()]
        for batch in self._turns.next_batches(waiting, tenants):
            if await self._queue.hold_batch(batch.batch_id, self._holder, HOLD_S):
                self._turns.took(batch)
                tenants.append(batch.tenant)
                task = asyncio.create_task(self._carry(batch.batch_id))
                self._running[batch.batch_id] = _Work(batch, task)
                task.add_done_callback(lambda _, batch_id=batch.batch_id: self._let_go(batch_id))

    def _let_go(self, batch_id: str) -> None:
        del self._running[batch_id]
        self.look()

    async def _carry(self, batch_id: str) -> None:
        """One batch to its end, or until it is another's."""
        work = asyncio.create_task(self._work(batch_id))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=BEAT_S)
                with suppress(QueueUnavailable):
                    if not await self._queue.hold_batch(batch_id, self._holder, HOLD_S):
                        return
            work.result()
        except (QueueUnavailable, StorageFull) as error:
            log.warning("a batch has to wait %s: %r", fields(batch=batch_id), error)
            wait_s = NO_ROOM_S if isinstance(error, StorageFull) else LOOK_EVERY_S
            self._not_before_s[batch_id] = asyncio.get_running_loop().time() + wait_s
        except Exception as error:
            await self._give_up(batch_id, incident(error, "batch"))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _give_up(self, batch_id: str, told: RequestError) -> None:
        """A bug of ours would be met again at every try."""
        with suppress(QueueUnavailable):
            batch = await self._queue.batch(batch_id)
            if batch is not None and batch.is_open:
                await self._fail(batch, BatchError(code=told.code, message=told.message))

    async def _work(self, batch_id: str) -> None:
        """Raises QueueUnavailable, StorageFull."""
        batch = await self._queue.batch(batch_id)
        if batch is None:
            return
        if not batch.is_open:
            await self._queue.put_batch(batch)  # its gateway may have died before removing it from the list
            return
        input_file = InputFile(self._queue, batch.input_file_id, LineIndex())
        try:
            batch, input_file = await self._read(batch)
            if batch.status is not BatchStatus.FINALIZING:
                batch = await self._ask(batch, input_file)
        except BadInput as bad:
            if batch.status is not BatchStatus.FINALIZING:
                await self._fail(batch, *bad.errors)
                return
        await self._become(await finish(self._queue, batch, input_file), batch.ends_as)

    async def _read(self, batch: Batch) -> tuple[Batch, InputFile]:
        """Where the requests are, and the room for what becomes of them. Raises BadInput, QueueUnavailable,
        StorageFull."""
        is_new = batch.status is BatchStatus.VALIDATING
        scanner = LineScanner(batch.endpoint, self._service.settings.max_body_bytes, checks=is_new)
        async with self._reading:
            await scan_file(self._queue, batch.input_file_id, scanner, partial(self._service.threads.run, batch.tenant))
        if is_new:
            num_bytes = len(scanner.index) * UNDONE_BYTES + scanner.num_id_bytes
            try:
                await self._queue.reserve_lines(batch, num_bytes, self._service.storage)
            except StorageFull as full:
                if not full.of_tenant:
                    raise
                refusal = storage_refusal(full)
                raise BadInput((BatchError(code=refusal.code, message=refusal.message),)) from None
            batch = await self._become(batch, BatchStatus.IN_PROGRESS, num_total=len(scanner.index))
        return batch, InputFile(self._queue, batch.input_file_id, scanner.index)

    async def _ask(self, batch: Batch, input_file: InputFile) -> Batch:
        """Raises BadInput where the input file is gone, QueueUnavailable."""
        progress = Progress(self._service, batch, input_file, self._slots)
        end = await progress.run()
        num_completed, _ = progress.counts
        errors = ()
        if end is BatchStatus.FAILED:
            message = "The batch ended early: its tenant has stored all that it may (delete files or responses)."
            errors = (BatchError(code=STORAGE_QUOTA_EXCEEDED, message=message),)
        counts = {"num_completed": num_completed, "num_failed": batch.num_total - num_completed}
        return await self._become(batch, BatchStatus.FINALIZING, ends_as=end, errors=errors, **counts)

    async def _fail(self, batch: Batch, *errors: BatchError) -> None:
        """Without files."""
        await self._queue.drop_lines(batch)
        await self._become(batch, BatchStatus.FAILED, errors=errors)

    async def _become(self, batch: Batch, status: BatchStatus, **changes) -> Batch:
        at_s = {**batch.at_s, status.value: await self._queue.now_s()}
        batch = replace(batch, status=status, at_s=at_s, **changes)
        await self._queue.put_batch(batch)
        log.info("batch %s", fields(batch=batch.batch_id, status=status, requests=batch.num_total))
        return batch

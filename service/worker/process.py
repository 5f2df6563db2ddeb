from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any

from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.engine.kv.table_view import TableView
from service.errors import EndReason
from service.garbage import freeze_heap
from service.observability.logs import fields
from service.observability.systemd import Supervisor
from service.observability.tracing import NO_TRACING, Tracing
from service.observability.worker_metrics import ENGINE, read_stats
from service.queue.codec import pack_ids
from service.queue.interface import QueueUnavailable, WorkerQueue
from service.queue.messages import BlockTable, WorkerCard
from service.shutdown import Shutdown
from service.worker.engine_thread import EngineThread, Stop
from service.worker.job_loop import EngineSizes, JobLoop, OutputInbox
from service.worker.peers import log_differences, require_one_model
from service.worker.watchdog import DEFAULT_STEP_TIMEOUT_S, Watchdog

log = logging.getLogger("quire.worker")

READY_SILENCE_S = 2.0
"""A worker in a longer step is not ready."""
MAX_NAMES_BYTES = 4096
FLUSH_S = 5.0
"""Time to publish the last events and return jobs."""


class EngineDied(Exception):
    """Engine thread that ended by itself or hangs; the process must end too."""


async def run_worker(
    settings: Settings,
    queue: WorkerQueue,
    stop: Shutdown,
    supervisor: Supervisor,
    on_ready: Callable[[], None],
    tracing: Tracing = NO_TRACING,
) -> None:
    """Serve jobs until `stop` is set, then drain. `supervisor` is fed after each step. Raises StartupError, or
    EngineDied once its jobs are returned."""
    await require_one_model(queue, settings.model_names[0])
    built = await asyncio.to_thread(build_engine, settings, progress=True)
    freeze_heap()
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    job_loop, engine, watchdog, death = _start(settings, queue, built, worker_id, supervisor, tracing)
    duties = asyncio.create_task(job_loop.run())
    stopped, died = (asyncio.create_task(event.wait()) for event in (stop, death.reported))
    if await _announced(job_loop, (duties, stopped, died)):
        log.info("worker ready %s", fields(worker=worker_id))
        on_ready()
        with suppress(QueueUnavailable):  # only the warning is lost
            await log_differences(queue, _card(worker_id, settings, built, engine, ready=True))
        await asyncio.wait([duties, stopped, died], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set() and not death.reported.is_set():
        draining = asyncio.create_task(job_loop.drain(settings.drain_timeout, stop.at_once))
        await asyncio.wait([draining, died], return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        engine.send(Stop(EndReason.SHUTDOWN))
    await _flush(job_loop, engine, death.cause)
    for task in (duties, stopped, died):
        task.cancel()
    failures = await asyncio.gather(duties, stopped, died, return_exceptions=True)
    with suppress(QueueUnavailable):  # the card expires
        await queue.retire(worker_id)
    if engine.join(FLUSH_S):
        watchdog.stop()
    if death.cause is not None:
        raise EngineDied from death.cause
    if isinstance(failures[0], Exception):
        raise failures[0]
    log.info("worker stopped %s", fields(worker=worker_id))


class _EngineDeath:
    """First cause of death, reported from any thread."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self.reported = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def report(self, cause: BaseException) -> None:
        self.cause = cause if self.cause is None else self.cause
        self._loop.call_soon_threadsafe(self.reported.set)


def _start(
    settings: Settings,
    queue: WorkerQueue,
    built: BuiltEngine,
    worker_id: str,
    supervisor: Supervisor,
    tracing: Tracing,
) -> tuple[JobLoop, EngineThread, Watchdog, _EngineDeath]:
    death, inbox = _EngineDeath(), OutputInbox()
    watchdog = Watchdog(settings.step_timeout or DEFAULT_STEP_TIMEOUT_S[built.ops.name], supervisor)
    engine = EngineThread(built.engine, inbox.on_outputs, death.report, watchdog.on_turn)

    def make_card(ready: bool) -> WorkerCard:
        return _card(worker_id, settings, built, engine, ready and engine.silent_s < READY_SILENCE_S)

    sizes = EngineSizes(
        built.config.vocab_size, settings.max_num_seqs, built.memory.num_blocks * built.memory.block_size
    )
    job_loop = JobLoop(queue, engine, inbox, make_card, sizes, tracing)
    engine.start()
    watchdog.watch(engine, death.report)
    return job_loop, engine, watchdog, death


async def _announced(job_loop: JobLoop, ends: Sequence[asyncio.Task[Any]]) -> bool:
    announced = asyncio.create_task(job_loop.announced.wait())
    await asyncio.wait([announced, *ends], return_when=asyncio.FIRST_COMPLETED)
    if announced.done():
        return True
    announced.cancel()
    await asyncio.gather(announced, return_exceptions=True)
    return False


async def _flush(job_loop: JobLoop, engine: EngineThread, death: BaseException | None) -> None:
    try:
        async with asyncio.timeout(FLUSH_S):
            if death is not None:
                await job_loop.abandon(engine.in_flight, f"{type(death).__name__}: {death}")
            else:
                await job_loop.wait_idle()
    except TimeoutError:  # others take over
        log.error("jobs not handed back %s", fields(num_open=job_loop.num_open))


def _card(worker_id: str, settings: Settings, built: BuiltEngine, engine: EngineThread, ready: bool) -> WorkerCard:
    return WorkerCard(
        worker_id=worker_id,
        model=settings.model_names[0],
        ready=ready,
        max_model_len=built.memory.max_model_len,
        num_blocks=built.memory.num_blocks,
        block_size=built.memory.block_size,
        beat_at_s=0.0,
        blocks=engine.blocks,
        host_blocks=engine.host_blocks,
        stats=read_stats(ENGINE, engine.stats),
        weight_format=built.weight_format,
        weight_bytes=built.executor.model.weights.num_bytes * built.ops.num_ranks,
        kv_cache_dtype=built.kv_format.dtype,
        block_bytes=built.memory.block_bytes,
        tables=tuple(map(_block_table, engine.tables)),
        max_loras=settings.max_loras if settings.enable_lora else 0,
        running_adapters=_joined(engine.stats.running_adapters),
        waiting_adapters=_joined(engine.stats.waiting_adapters),
    )


def _joined(names: Sequence[str]) -> str:
    """Return names up to MAX_NAMES_BYTES, comma-separated."""
    sizes = accumulate(len(name.encode()) + 1 for name in names)
    return ",".join(name for name, size in zip(names, sizes, strict=True) if size <= MAX_NAMES_BYTES)


def _block_table(view: TableView) -> BlockTable:
    return BlockTable(
        request_id=view.request_id,
        branch=view.branch,
        num_prompt_tokens=view.num_prompt_tokens,
        num_tokens=view.num_tokens,
        num_computed_tokens=view.num_computed_tokens,
        num_blocks=view.num_blocks,
        blocks=pack_ids(view.blocks),
        holders=pack_ids(view.holders),
        states=view.states,
        copies=pack_ids([*chain.from_iterable(view.copied_from.items())]),
        host_blocks=pack_ids(view.host_blocks),
        num_drafted=view.num_drafted,
        num_accepted=view.num_accepted,
    )

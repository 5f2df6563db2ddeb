"""The worker process: builds the engine, wires it to the queue, and leaves in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.errors import EndReason
from service.garbage import freeze_heap
from service.observability import metrics
from service.observability.logs import fields
from service.observability.systemd import Supervisor
from service.observability.tracing import NO_TRACING, Tracing
from service.queue.interface import QueueUnavailable, WorkerQueue
from service.queue.messages import WorkerCard
from service.worker.engine_thread import EngineThread, Stop
from service.worker.job_loop import JobLoop
from service.worker.watchdog import DEFAULT_STEP_TIMEOUT_S, Watchdog

log = logging.getLogger("quire.worker")

READY_SILENCE_S = 2.0
"""A worker whose step takes longer says that it is not ready, long before the step counts as hung."""
LAST_WORDS_S = 5.0
"""How long what is left may take to reach the queue."""


class EngineDied(Exception):
    """The engine thread ended by itself, or hangs; the process must end too."""


async def run_worker(
    settings: Settings,
    queue: WorkerQueue,
    stop: asyncio.Event,
    supervisor: Supervisor,
    on_ready: Callable[[], None],
    tracing: Tracing = NO_TRACING,
) -> None:
    """Serve jobs until `stop` is set, then drain. `supervisor` hears of the engine's turns. Raises StartupError, or
    EngineDied once its jobs are back in the queue."""
    built = await asyncio.to_thread(build_engine, settings, progress=True)
    freeze_heap()
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    job_loop, engine, watchdog, death = _start(settings, queue, built, worker_id, supervisor, tracing)
    duties = asyncio.create_task(job_loop.run())
    stopped, died = (asyncio.create_task(event.wait()) for event in (stop, death.seen))
    if await _announced(job_loop, (duties, stopped, died)):
        log.info("worker ready %s", fields(worker=worker_id))
        on_ready()
        await asyncio.wait([duties, stopped, died], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set() and not death.seen.is_set():
        draining = asyncio.create_task(job_loop.drain(settings.drain_timeout))
        await asyncio.wait([draining, died], return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        engine.send(Stop(EndReason.SHUTDOWN))
    await _last_words(job_loop, engine, death.cause)
    for task in (duties, stopped, died):
        task.cancel()
    failures = await asyncio.gather(duties, stopped, died, return_exceptions=True)
    with suppress(QueueUnavailable):  # the card goes stale by itself
        await queue.retire(worker_id)
    if engine.join(LAST_WORDS_S):
        watchdog.stop()
    if death.cause is not None:
        raise EngineDied from death.cause
    if isinstance(failures[0], Exception):
        raise failures[0]
    log.info("worker stopped %s", fields(worker=worker_id))


class _Death:
    """Of the engine: the first that is told of, from whichever thread."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self.seen = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def tell(self, cause: BaseException) -> None:
        self.cause = cause if self.cause is None else self.cause
        self._loop.call_soon_threadsafe(self.seen.set)


def _start(
    settings: Settings,
    queue: WorkerQueue,
    built: BuiltEngine,
    worker_id: str,
    supervisor: Supervisor,
    tracing: Tracing,
) -> tuple[JobLoop, EngineThread, Watchdog, _Death]:
    """The engine's thread runs, and is watched; no job is taken yet."""
    death = _Death()

    def make_card(ready: bool) -> WorkerCard:
        return _card(worker_id, settings, built, engine, ready and engine.silent_s < READY_SILENCE_S)

    num_cache_tokens = built.memory.num_blocks * built.memory.block_size
    job_loop = JobLoop(queue, make_card, built.config.vocab_size, settings.max_num_seqs, num_cache_tokens, tracing)
    watchdog = Watchdog(settings.step_timeout or DEFAULT_STEP_TIMEOUT_S[built.ops.name], supervisor)
    engine = EngineThread(built.engine, job_loop.on_outputs, death.tell, watchdog.turned)
    job_loop.engine = engine
    engine.start()
    watchdog.watch(engine, death.tell)
    return job_loop, engine, watchdog, death


async def _announced(job_loop: JobLoop, ends: Sequence[asyncio.Task]) -> bool:
    """Waits until the queue knows of this worker. False: one of `ends` was done before."""
    announced = asyncio.create_task(job_loop.announced.wait())
    await asyncio.wait([announced, *ends], return_when=asyncio.FIRST_COMPLETED)
    if announced.done():
        return True
    announced.cancel()
    await asyncio.gather(announced, return_exceptions=True)
    return False


async def _last_words(job_loop: JobLoop, engine: EngineThread, death: BaseException | None) -> None:
    """What was told goes out; what is left goes back to the queue."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            if death is not None:
                await job_loop.abandon(engine.in_flight, f"{type(death).__name__}: {death}")
            else:
                await job_loop.settled()
    except TimeoutError:  # others take over once the lease has run out
        log.error("jobs not given back %s", fields(num_open=job_loop.num_open))


def _card(worker_id: str, settings: Settings, built: BuiltEngine, engine: EngineThread, ready: bool) -> WorkerCard:
    stats = engine.stats
    return WorkerCard(
        worker_id=worker_id,
        model=settings.served_model_name or settings.model.name,
        ready=ready,
        max_model_len=built.memory.max_model_len,
        num_blocks=built.memory.num_blocks,
        block_size=built.memory.block_size,
        beat_at_s=0.0,
        blocks=engine.blocks,
        host_blocks=engine.host_blocks,
        stats={
            metrics.STAT_NUM_RUNNING: stats.num_running,
            metrics.STAT_NUM_WAITING: stats.num_waiting,
            metrics.STAT_NUM_BLOCKS_FREE: stats.num_blocks_free,
            metrics.STAT_NUM_BLOCKS_USED: stats.num_blocks_used - stats.num_blocks_shared,
            metrics.STAT_NUM_BLOCKS_SHARED: stats.num_blocks_shared,
            metrics.STAT_NUM_BLOCKS_CACHED: stats.num_blocks_cached,
            metrics.STAT_NUM_HOST_BLOCKS_FREE: stats.num_host_blocks_free,
            metrics.STAT_NUM_HOST_BLOCKS_USED: stats.num_host_blocks_used,
            metrics.STAT_NUM_HOST_BLOCKS_CACHED: stats.num_host_blocks_cached,
            metrics.STAT_KV_USAGE: stats.num_blocks_used / built.memory.num_blocks,
            metrics.STAT_KV_WASTE_RATIO: stats.waste_ratio(built.memory.block_size),
            metrics.STAT_PROMPT_TOKENS_TOTAL: stats.num_prompt_tokens,
            metrics.STAT_GENERATION_TOKENS_TOTAL: stats.num_output_tokens,
            metrics.STAT_PREEMPTIONS_TOTAL: stats.num_preemptions,
            metrics.STAT_SWAPPED_TOTAL: stats.num_swapped,
            metrics.STAT_RECOMPUTED_TOTAL: stats.num_recomputed,
            metrics.STAT_RECLAIMED_TOTAL: stats.num_reclaimed,
            metrics.STAT_RECOMPUTED_TOKENS_TOTAL: stats.num_recomputed_tokens,
            metrics.STAT_RECOMPUTE_S_TOTAL: stats.recompute_s,
            metrics.STAT_SWAP_OUT_BYTES_TOTAL: stats.num_blocks_out * built.memory.block_bytes,
            metrics.STAT_SWAP_IN_BYTES_TOTAL: stats.num_blocks_in * built.memory.block_bytes,
            metrics.STAT_SWAP_OUT_S_TOTAL: stats.swap_out_s,
            metrics.STAT_SWAP_IN_S_TOTAL: stats.swap_in_s,
            metrics.STAT_COPY_ON_WRITE_TOTAL: stats.num_block_copies,
            metrics.STAT_PREFIX_QUERY_TOKENS_TOTAL: stats.num_query_tokens,
            metrics.STAT_PREFIX_HIT_TOKENS_TOTAL: stats.num_hit_tokens,
            metrics.STAT_STEPS_TOTAL: stats.num_steps,
            metrics.STAT_STEP_TIME_MS: 1e3 * stats.last_step_s,
        },
    )

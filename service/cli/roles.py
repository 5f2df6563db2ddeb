"""`quire gateway` and `quire worker`: one part of the service, on a Redis that is already there."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvloop

from service.cli.supervised import supervised
from service.config.settings import Settings
from service.errors import StartupError
from service.gateway.process import run_gateway
from service.observability.systemd import Supervisor
from service.observability.tracing import Tracing, open_tracing
from service.queue.interface import QueueUnavailable
from service.queue.redis.queue import RedisQueue, open_redis_queue
from service.queue.redis.url import with_password
from service.worker.process import EngineDied, run_worker

log = logging.getLogger("quire.cli")

READY = "ready"
"""First word of the line that a part prints once it serves; `quire serve` waits for it."""


def gateway_command(settings: Settings, _: argparse.Namespace) -> int:
    """Returns the exit status; raises StartupError."""

    supervisor = Supervisor(os.environ)

    def on_ready(url: str) -> None:
        print(READY, url, flush=True)
        supervisor.ready(f"listens on {url}")

    async def run(stop: asyncio.Event) -> None:
        async with (
            supervised(supervisor, stop, by_loop=True),
            _queue(settings) as queue,
            _tracing("gateway") as tracing,
        ):
            await run_gateway(settings, queue, stop, on_ready=on_ready, tracing=tracing)

    return run_until_signalled(run)


def worker_command(settings: Settings, _: argparse.Namespace) -> int:
    """Returns the exit status, 1 if the engine died; raises StartupError."""

    supervisor = Supervisor(os.environ)

    def on_ready() -> None:
        print(READY, flush=True)
        supervisor.ready("takes jobs")

    async def run(stop: asyncio.Event) -> None:
        async with (
            supervised(supervisor, stop, by_loop=False),
            _queue(settings) as queue,
            _tracing("worker") as tracing,
        ):
            await run_worker(settings, queue, stop, supervisor, on_ready, tracing)

    try:
        return run_until_signalled(run)
    except EngineDied as death:
        log.critical("the engine died", exc_info=death.__cause__)
        sys.stdout.flush()
        logging.shutdown()
        os._exit(1)  # tidying up would wait for a device, or a thread, that never answers


@asynccontextmanager
async def _queue(settings: Settings) -> AsyncIterator[RedisQueue]:
    if settings.redis_url is None:
        raise StartupError("--redis-url is missing (quire serve starts a Redis of its own)")
    try:
        url = with_password(settings.redis_url, settings.redis_password_file)
        queue = await open_redis_queue(url, settings.worker_name, lease_s=settings.lease)
    except QueueUnavailable as error:
        raise StartupError(f"--redis-url: {error}") from None
    try:
        yield queue
    finally:
        await queue.close()


@asynccontextmanager
async def _tracing(part: str) -> AsyncIterator[Tracing]:
    tracing = open_tracing(part, os.environ)
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.close)


def run_until_signalled(run: Callable[[asyncio.Event], Awaitable[int | None]]) -> int:
    """Run a coroutine that ends soon after its event is set; SIGTERM and SIGINT set it."""

    async def main() -> int:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return await run(stop) or 0

    return uvloop.run(main())

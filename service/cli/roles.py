"""`quire gateway` and `quire worker`: one process of the service, on an existing Redis."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import uvloop

from service.config.settings import Settings
from service.errors import StartupError
from service.gateway.process import run_gateway
from service.observability.systemd import Supervisor
from service.observability.tracing import Tracing, open_tracing
from service.queue.interface import GatewayQueue, QueueUnavailable, WorkerQueue
from service.queue.redis.address import with_password
from service.queue.redis.connect import open_gateway_queue, open_worker_queue
from service.worker.process import EngineDied, run_worker

log = logging.getLogger("quire.cli")

QueueT = TypeVar("QueueT", GatewayQueue, WorkerQueue)

READY = "ready"
"""First word of a serving role's line, which `quire serve` awaits."""


def gateway_command(settings: Settings, _: argparse.Namespace) -> int:
    """Run a gateway; return the exit status. Raises StartupError."""

    supervisor = Supervisor(os.environ)

    def on_ready(url: str) -> None:
        print(READY, url, flush=True)
        supervisor.ready(f"listening on {url}")

    async def run(stop: asyncio.Event) -> None:
        async with (
            supervised(supervisor, stop, by_loop=True),
            _open(settings, open_gateway_queue) as queue,
            _tracing("gateway") as tracing,
        ):
            await run_gateway(settings, queue, stop, on_ready=on_ready, tracing=tracing)

    return run_until_signalled(run)


def worker_command(settings: Settings, _: argparse.Namespace) -> int:
    """Run a worker; return the exit status, 1 if the engine died. Raises StartupError."""

    supervisor = Supervisor(os.environ)

    def on_ready() -> None:
        print(READY, flush=True)
        supervisor.ready("taking jobs")

    async def run(stop: asyncio.Event) -> None:
        async with (
            supervised(supervisor, stop, by_loop=False),
            _open(settings, partial(open_worker_queue, lease_s=settings.lease)) as queue,
            _tracing("worker") as tracing,
        ):
            await run_worker(settings, queue, stop, supervisor, on_ready, tracing)

    try:
        return run_until_signalled(run)
    except EngineDied as death:
        log.critical("the engine died", exc_info=death.__cause__)
        sys.stdout.flush()
        logging.shutdown()
        os._exit(1)  # cleaning up would wait for a device or thread that never answers


@asynccontextmanager
async def supervised(supervisor: Supervisor, stop: asyncio.Event, *, by_loop: bool) -> AsyncIterator[None]:
    """Notify the supervisor when `stop` is set and, `by_loop`, of the event loop's progress."""
    tasks = [asyncio.create_task(_notify_stop(supervisor, stop))]
    if by_loop and supervisor.feed_every_s is not None:
        tasks.append(asyncio.create_task(_feed(supervisor, supervisor.feed_every_s)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _notify_stop(supervisor: Supervisor, stop: asyncio.Event) -> None:
    await stop.wait()
    supervisor.stopping()


async def _feed(supervisor: Supervisor, every_s: float) -> None:
    while True:
        supervisor.feed()
        await asyncio.sleep(every_s)


@asynccontextmanager
async def _open(settings: Settings, connect: Callable[[str, str | None], Awaitable[QueueT]]) -> AsyncIterator[QueueT]:
    if settings.redis_url is None:
        raise StartupError("--redis-url: missing (quire serve starts an embedded Redis)")
    try:
        url = with_password(settings.redis_url, settings.redis_password_file)
        queue = await connect(url, settings.worker_name)
    except QueueUnavailable as error:
        raise StartupError(f"--redis-url: {error}") from None
    try:
        yield queue
    finally:
        await queue.close()


@asynccontextmanager
async def _tracing(role: str) -> AsyncIterator[Tracing]:
    tracing = open_tracing(role, os.environ)
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.close)


def run_until_signalled(run: Callable[[asyncio.Event], Awaitable[int | None]]) -> int:
    """Run a coroutine; SIGTERM and SIGINT set its event."""

    async def main() -> int:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return await run(stop) or 0

    return uvloop.run(main())

"""Signals, supervisor, Redis and tracing of the processes of the service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import uvloop

from service.config.settings import Settings
from service.errors import StartupError
from service.observability.systemd import Supervisor
from service.observability.tracing import Tracing, open_tracing
from service.queue.interface import GatewayQueue, QueueUnavailable, WorkerQueue
from service.queue.redis.address import with_password

QueueT = TypeVar("QueueT", GatewayQueue, WorkerQueue)

READY = "ready"
"""First word of a serving role's line, which `quire serve` awaits."""

REFUSED = "refused"
"""First word in its place, before the error of a role that does not start."""

STARTED_BY_SERVE = "QUIRE_STARTED_BY_SERVE"
"""Variable of a role whose parent reports its error: several that start alike fail alike."""


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
async def open_queue(
    settings: Settings, connect: Callable[[str, str | None], Awaitable[QueueT]]
) -> AsyncIterator[QueueT]:
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
async def opened_tracing(role: str) -> AsyncIterator[Tracing]:
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

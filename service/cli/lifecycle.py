"""Lifecycle of a service process: Redis, tracing, supervisor, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import uvloop

from service.config.settings import Settings
from service.errors import StartupError
from service.observability.systemd import Supervisor
from service.observability.tracing import Tracing, open_tracing
from service.queue.interface import GatewayQueue, QueueUnavailable, WorkerQueue
from service.queue.redis.password import with_password
from service.shutdown import Shutdown

log = logging.getLogger("quire.cli")

QueueT = TypeVar("QueueT", GatewayQueue, WorkerQueue)

READY = "ready"
"""First word of the line printed by a serving process, which `quire serve` waits for."""

REFUSED = "refused"
"""First word printed instead if the process cannot start; the error follows."""

STARTED_BY_SERVE = "QUIRE_STARTED_BY_SERVE"
"""Variable set if the parent process reports errors, since several identical children fail alike."""

AT_ONCE = signal.SIGQUIT
"""Signal that ends a process without draining, like a second Ctrl-C."""

AT_ONCE_S = 3.0
"""Time to end open requests and hand back jobs before the process exits."""

EXIT_AT_ONCE = 128 + signal.SIGINT


@asynccontextmanager
async def supervised(supervisor: Supervisor, stop: asyncio.Event, *, by_loop: bool) -> AsyncIterator[None]:
    """Notify the supervisor when `stop` is set and, with `by_loop`, of the event loop's progress."""
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


def run_until_signalled(run: Callable[[Shutdown], Awaitable[int | None]]) -> int:
    """Run a coroutine. SIGTERM and SIGINT set its event; AT_ONCE and a second SIGINT set `at_once` too."""

    async def main() -> int:
        stop, loop = Shutdown(), asyncio.get_running_loop()

        def end_at_once() -> None:
            stop.set()
            if not stop.at_once.is_set():
                stop.at_once.set()
                log.warning("ending without draining: open requests are cut off")
                loop.call_later(AT_ONCE_S, _exit, EXIT_AT_ONCE)

        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, lambda: end_at_once() if stop.is_set() else stop.set())
        loop.add_signal_handler(AT_ONCE, end_at_once)
        status = await run(stop) or 0
        if stop.at_once.is_set():
            _exit(EXIT_AT_ONCE)  # does not wait for threads that are still loading a model
        return status

    return uvloop.run(main())


def _exit(status: int) -> None:
    sys.stdout.flush()
    logging.shutdown()
    os._exit(status)

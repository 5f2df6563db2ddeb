"""Tells the supervisor, systemd if any, how a command that runs an event loop is doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.observability.systemd import Supervisor


@asynccontextmanager
async def supervised(supervisor: Supervisor, stop: asyncio.Event, *, by_loop: bool) -> AsyncIterator[None]:
    """Inside, the supervisor hears when `stop` is set and, `by_loop`, that the event loop turns. A worker's moving is
    not its loop's: its engine tells of it."""
    tasks = [asyncio.create_task(_tell_stop(supervisor, stop))]
    if by_loop and supervisor.feed_every_s is not None:
        tasks.append(asyncio.create_task(_feed(supervisor, supervisor.feed_every_s)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell_stop(supervisor: Supervisor, stop: asyncio.Event) -> None:
    await stop.wait()
    supervisor.stopping()


async def _feed(supervisor: Supervisor, every_s: float) -> None:
    while True:
        supervisor.feed()
        await asyncio.sleep(every_s)

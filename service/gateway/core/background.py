"""Background writes: retried until the queue answers, for a bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from service.observability.logs import fields
from service.queue.interface import QueueUnavailable

log = logging.getLogger("quire.gateway")

REPEAT_FOR_S = 60.0
RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
MAX_REPEATED = 4096
"""Writes that may be repeated at once; with more, a write gets one try."""
CLOSE_TIMEOUT_S = 2.0
WRITE_WITHIN_S, WRITE_RETRY_S = 6.0, 0.2


async def write(attempt: Callable[[], Awaitable[Any]], within_s: float = WRITE_WITHIN_S) -> None:
    """Make a write whose answer a client waits for, and again while the queue is away: one that changes nothing the
    second time. Raises QueueUnavailable when the time is up."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + within_s
    while True:
        try:
            await attempt()
            return
        except QueueUnavailable:
            if loop.time() > give_up_s:
                raise
            await asyncio.sleep(WRITE_RETRY_S)


class BackgroundWrites:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def repeat(self, attempt: Callable[[], Awaitable[Any]], what: str, for_s: float = REPEAT_FOR_S, **about) -> None:
        """Make the write, and again while the queue is away. `attempt` may have happened and be made again."""
        self.spawn(self.until_known(attempt, what, for_s, **about))

    async def until_known(
        self, attempt: Callable[[], Awaitable[Any]], what: str, for_s: float = REPEAT_FOR_S, **about
    ) -> bool:
        """The same, waited for. Returns whether the queue has answered; if not, the log says so."""
        loop = asyncio.get_running_loop()
        give_up_s, num_tries = loop.time() + for_s, 0
        while True:
            try:
                await attempt()
                return True
            except QueueUnavailable as error:
                wait_s = RETRY_S[min(num_tries, len(RETRY_S) - 1)]
                num_tries += 1
                if loop.time() + wait_s > give_up_s or len(self._tasks) > MAX_REPEATED:
                    log.warning(
                        "%s: the queue did not answer %s", what, fields(num_tries=num_tries, **about, error=error)
                    )
                    return False
                await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Wait a while for the writes that are under way; those that are left then are not made."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in list(self._tasks):
            task.cancel()

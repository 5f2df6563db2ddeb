"""Writes to the queue, retried during short outages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from service.config.settings import Settings
from service.gateway.core.refusals import storage_refusal, unavailable
from service.observability.logs import fields
from service.queue.interface import QueueUnavailable
from service.queue.records import StorageFull, StorageLimits

Answer = TypeVar("Answer")

log = logging.getLogger("quire.gateway")

REPEAT_FOR_S = 60.0
RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
MAX_REPEATED = 4096
"""Background writes that may retry at once; any further write gets one attempt."""
CLOSE_TIMEOUT_S = 2.0
WRITE_WITHIN_S, WRITE_RETRY_S = 6.0, 0.2


async def write(attempt: Callable[[], Awaitable[Any]], within_s: float = WRITE_WITHIN_S) -> None:
    """Run an idempotent write; retry while the queue is unavailable. Raises QueueUnavailable after `within_s`."""
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


async def stored(call: Awaitable[Answer]) -> Answer:
    """Await a store call. Raises RequestError (429, 503) if the store is full or unavailable."""
    try:
        return await call
    except QueueUnavailable:
        raise unavailable() from None
    except StorageFull as full:
        raise storage_refusal(full) from None


def storage_limits(settings: Settings) -> StorageLimits:
    return StorageLimits(
        max_bytes_per_tenant=settings.max_stored_bytes_per_tenant, queue_share=settings.queue_memory_share
    )


class BackgroundWrites:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def repeat(
        self, attempt: Callable[[], Awaitable[Any]], what: str, for_s: float = REPEAT_FOR_S, **about: Any
    ) -> None:
        """Run an idempotent write in the background; retry for `for_s` while the queue is unavailable."""
        self.spawn(self.until_known(attempt, what, for_s, **about))

    async def until_known(
        self, attempt: Callable[[], Awaitable[Any]], what: str, for_s: float = REPEAT_FOR_S, **about: Any
    ) -> bool:
        """Like `repeat`, but wait for it. Return whether the queue answered; log `what` if not."""
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
        """Wait up to CLOSE_TIMEOUT_S for pending writes, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in list(self._tasks):
            task.cancel()

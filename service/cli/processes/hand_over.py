"""Hands over a dead worker's jobs. `quire serve` imports this on demand, because Redis' client is slow to import."""

from __future__ import annotations

import logging
from functools import partial

from service.cli.lifecycle import open_queue
from service.config.settings import Settings
from service.errors import StartupError
from service.queue.interface import QueueUnavailable
from service.queue.redis.connect import open_worker_queue

log = logging.getLogger("quire.serve")


async def hand_over_jobs(settings: Settings) -> None:
    """Return a dead worker's jobs to the queue before its lease expires."""
    try:
        async with open_queue(settings, partial(open_worker_queue, lease_s=settings.lease)) as queue:
            await queue.take_over()
    except (StartupError, QueueUnavailable) as error:  # the worker's successor does it
        log.warning("the dead worker's jobs wait for its restart: %s", error)

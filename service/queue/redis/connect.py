"""Opening the queue on a Redis 6.2 or newer, as a gateway or as a worker."""

from __future__ import annotations

import os
import secrets
import socket

from service.queue.redis.gateway import RedisGatewayQueue
from service.queue.redis.link import RedisLink, open_link
from service.queue.redis.worker import RedisWorkerQueue, last_cancel

TIMEOUT_S = 3.0
LEASE_S = 10.0


async def open_gateway_queue(url: str, name: str | None = None, timeout_s: float = TIMEOUT_S) -> RedisGatewayQueue:
    """Connect as a gateway. `name` is unique among live processes; a process that restarts under its name gets back the
    ingress entries it had not settled. A command that exceeds `timeout_s` has failed. Raises StartupError for an
    unusable URL or server, QueueUnavailable if none answers."""
    return RedisGatewayQueue(await open_link(url, timeout_s), name or own_name())


async def open_worker_queue(
    url: str, name: str | None = None, timeout_s: float = TIMEOUT_S, lease_s: float = LEASE_S
) -> RedisWorkerQueue:
    """Connect as a worker that owns its jobs for `lease_s` after each heartbeat. The rest is as in
    `open_gateway_queue`: a worker that restarts under its name gets back its jobs."""
    link = await open_link(url, timeout_s)
    try:
        return await join_as_worker(link, name or own_name(), lease_s)
    except BaseException:
        await link.close()
        raise


async def join_as_worker(link: RedisLink, name: str, lease_s: float) -> RedisWorkerQueue:
    """Return the queue of a worker that hears all cancels from now on. Raises QueueUnavailable."""
    return RedisWorkerQueue(link, name, await last_cancel(link), lease_s)


def own_name() -> str:
    """Return a name that no other process has."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"

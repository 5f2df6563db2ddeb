"""The queue on a Redis 6.2 or newer: both halves over the same connections."""

from __future__ import annotations

import os
import secrets
import socket

from service.queue import keys
from service.queue.redis.batches import RedisBatches
from service.queue.redis.gateway import RedisGatewayQueue
from service.queue.redis.link import STREAM_START, RedisLink
from service.queue.redis.requests import RedisRequests
from service.queue.redis.responses import RedisResponses
from service.queue.redis.worker import RedisWorkerQueue

TIMEOUT_S = 3.0
LEASE_S = 10.0


class RedisQueue(RedisGatewayQueue, RedisRequests, RedisBatches, RedisResponses, RedisWorkerQueue):
    """GatewayQueue and WorkerQueue in one. Made by `open_redis_queue`."""

    def __init__(self, link: RedisLink, name: str, cancels_from: str, lease_s: float):
        RedisGatewayQueue.__init__(self, link, name)
        RedisRequests.__init__(self, link)
        RedisBatches.__init__(self, link)
        RedisResponses.__init__(self, link)
        RedisWorkerQueue.__init__(self, link, name, cancels_from, lease_s)

    async def close(self) -> None:
        await self.close_readers()
        await self._link.close()


async def open_redis_queue(
    url: str, name: str | None = None, timeout_s: float = TIMEOUT_S, lease_s: float = LEASE_S
) -> RedisQueue:
    """Connect to redis://, rediss://, unix:// or redis+sentinel://. `name` is this process's name, unique among those
    alive; one that comes back gets what it had not settled. A command that takes longer than timeout_s has failed; a
    worker's jobs are its own for lease_s after each heartbeat. Raises StartupError for a URL or a server that cannot be
    used, QueueUnavailable if nobody answers."""
    link = RedisLink(url, timeout_s)
    try:
        await link.check()
        async with link.commands() as redis:
            last = await redis.xrevrange(keys.CANCELS, count=1)
    except BaseException:
        await link.close()
        raise
    cancels_from = last[0][0].decode() if last else STREAM_START
    return RedisQueue(link, name or own_name(), cancels_from, lease_s)


def own_name() -> str:
    """A name for this process that no other has."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"

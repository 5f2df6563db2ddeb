from __future__ import annotations

from service.queue.process_name import own_name
from service.queue.redis.gateway import RedisGatewayQueue
from service.queue.redis.link import RedisLink, open_link
from service.queue.redis.worker import RedisWorkerQueue, last_cancel

TIMEOUT_S = 3.0
LEASE_S = 10.0


async def open_gateway_queue(url: str, name: str | None = None, timeout_s: float = TIMEOUT_S) -> RedisGatewayQueue:
    """Connect as gateway `name`, unique among live processes; a successor gets its ingress entries. Raises StartupError
    for an unusable URL or server, QueueUnavailable if none answers within `timeout_s`."""
    return RedisGatewayQueue(await open_link(url, timeout_s), name or own_name())


async def open_worker_queue(
    url: str, name: str | None = None, timeout_s: float = TIMEOUT_S, lease_s: float = LEASE_S
) -> RedisWorkerQueue:
    """Connect like a gateway. A worker owns its jobs for `lease_s` after each heartbeat."""
    link = await open_link(url, timeout_s)
    try:
        return await join_as_worker(link, name or own_name(), lease_s)
    except BaseException:
        await link.close()
        raise


async def join_as_worker(link: RedisLink, name: str, lease_s: float) -> RedisWorkerQueue:
    """Return a queue that receives all cancels from now on. Raises QueueUnavailable."""
    return RedisWorkerQueue(link, name, await last_cancel(link), lease_s)

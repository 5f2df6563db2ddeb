"""Both ends of one queue, for tests that act as gateway and worker."""

from __future__ import annotations

from typing import Any

from service.queue.interface import GatewayQueue, WorkerQueue
from service.queue.process_name import own_name
from service.queue.redis.connect import LEASE_S, TIMEOUT_S, join_as_worker
from service.queue.redis.gateway import RedisGatewayQueue
from service.queue.redis.link import open_link
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.queue.worker import MemoryWorkerQueue


class QueuePair:
    """Attributes of the gateway's end, and the worker's own."""

    def __init__(self, gateway: GatewayQueue, worker: WorkerQueue) -> None:
        self.gateway = gateway
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gateway if hasattr(self.gateway, name) else self.worker, name)

    async def close(self) -> None:
        await self.gateway.close()
        await self.worker.close()


def memory_pair(data: QueueData | None = None, name: str | None = None, lease_s: float = LEASE_S) -> QueuePair:
    data = QueueData() if data is None else data
    return QueuePair(MemoryGatewayQueue(data), MemoryWorkerQueue(data, name, lease_s))


async def open_pair(
    url: str, name: str | None = None, timeout_s: float = TIMEOUT_S, lease_s: float = LEASE_S
) -> QueuePair:
    """Connect both ends over one link."""
    link = await open_link(url, timeout_s)
    name = name or own_name()
    try:
        return QueuePair(RedisGatewayQueue(link, name), await join_as_worker(link, name, lease_s))
    except BaseException:
        await link.close()
        raise

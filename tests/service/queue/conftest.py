"""One real Redis for the tests of the wire, emptied before each; queues on it and in memory."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis import Redis

from service.queue.embedded.redis import EmbeddedRedis
from tests.fakes.queue.queue_data import QueueData
from tests.support.configured_redis import ConfiguredRedis, open_roles_pair
from tests.support.queue_pair import QueuePair, memory_pair, open_pair
from tests.support.wire import OpenQueue


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    with Redis.from_url(redis_server.url) as redis:
        redis.flushall()
    return redis_server.url


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as redis:
        yield redis


@pytest.fixture
async def open_queue(redis_url: str) -> AsyncIterator[OpenQueue]:
    """Opens queues on the test's Redis that are closed when the test is over."""
    async with AsyncExitStack() as opened:

        async def open_one(name: str | None = None, url: str = redis_url, **options) -> QueuePair:
            queue = await open_pair(url, name, **options)
            opened.push_async_callback(queue.close)
            return queue

        yield open_one


@pytest.fixture(scope="session")
def configured_redis() -> Iterator[ConfiguredRedis]:
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        server = ConfiguredRedis(Path(folder))
        yield server
        server.stop()


@pytest.fixture
def guarded_redis(configured_redis: ConfiguredRedis) -> Iterator[ConfiguredRedis]:
    """Empty, and at the end no role was refused anything."""
    configured_redis.admin.flushall()
    configured_redis.refusals()
    yield configured_redis
    assert configured_redis.refusals() == []


@pytest.fixture(params=["memory", "redis", "roles"])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[QueuePair]:
    if request.param == "redis":
        queue = await open_pair(request.getfixturevalue("redis_url"))
    elif request.param == "roles":
        queue = await open_roles_pair(request.getfixturevalue("guarded_redis"))
    else:
        queue = memory_pair()
    yield queue
    await queue.close()


@pytest.fixture(params=["memory", "redis", "roles"])
async def join(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Awaitable[QueuePair]]]:
    """Opens queues that meet in one queue, of either kind; closed when the test is over."""
    data = QueueData()
    async with AsyncExitStack() as opened:

        async def join_one(name: str | None = None, lease_s: float = 10.0) -> QueuePair:
            if request.param == "redis":
                queue = await open_pair(request.getfixturevalue("redis_url"), name, lease_s=lease_s)
            elif request.param == "roles":
                queue = await open_roles_pair(request.getfixturevalue("guarded_redis"), name, lease_s=lease_s)
            else:
                queue = memory_pair(data, name, lease_s)
            opened.push_async_callback(queue.close)
            return queue

        yield join_one


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"

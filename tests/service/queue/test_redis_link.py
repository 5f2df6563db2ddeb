"""The link to Redis: cancelled calls end, and a silent server delays no caller for long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import NoReturn

import pytest

from service.queue.interface import QueueUnavailable
from service.queue.redis.link import RedisLink
from tests.support.redis_way import ping, pretender
from tests.support.wire import PATIENCE_S
from tests.support.worker_harness import WorkerHarness


@pytest.fixture
async def link(redis_url) -> AsyncIterator[RedisLink]:
    opened = RedisLink(redis_url, 2.0)
    yield opened
    await opened.close()


@pytest.fixture
async def mute() -> AsyncIterator[int]:
    """The port of a server that takes connections and never says a word."""
    async with pretender(b"") as port:
        yield port


async def test_a_cancel_at_any_moment_ends_its_task(link: RedisLink):
    """Each call closes its own connection; redis-py lost one in three of such cancels under Python 3.11."""

    async def ask_on() -> NoReturn:
        while True:
            await ping(link)

    for seed in range(100):
        asking = asyncio.create_task(ask_on())
        for _ in range(random.Random(seed).randrange(60)):
            await asyncio.sleep(0)
        asking.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(asyncio.CancelledError):
                await asking
        assert asking.cancelled()


async def test_a_worker_ends_whenever_it_is_cancelled(open_queue):
    """Each of its duties is cancelled once."""
    queue = await open_queue()
    for seed in range(20):
        async with asyncio.timeout(PATIENCE_S), WorkerHarness(queue) as worker:
            await worker.submit([1, 2, 3], max_tokens=100)
            for _ in range(random.Random(seed).randrange(150)):
                await asyncio.sleep(0)


async def _refused(work: Awaitable[None]) -> float:
    """Seconds until it was."""
    before_s = time.monotonic()
    with pytest.raises(QueueUnavailable, match="no answer in time"):
        await work
    return time.monotonic() - before_s


async def test_a_silent_redis_is_unavailable(mute):
    link = RedisLink(f"redis://127.0.0.1:{mute}", 0.2)
    try:
        assert await _refused(ping(link)) >= 0.2
        assert await _refused(link.check()) >= 0.2
    finally:
        await link.close()


@pytest.mark.parametrize("form", ["redis+cluster://{}", "redis+sentinel://{}/quire"])
async def test_silent_addresses_are_tried_last(mute, form):
    """More of them than fit into a command's time: the next one begins after them."""
    asked = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    async with await asyncio.start_server(count, "127.0.0.1", 0) as server:
        nodes = [f"127.0.0.1:{mute}"] * 5 + [f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        link = RedisLink(form.format(",".join(nodes)), 0.4)
        try:
            await _refused(ping(link))
            assert asked == 0
            with pytest.raises(QueueUnavailable):
                await ping(link)
            assert asked == 1
        finally:
            await link.close()

"""Text threads: turns between tenants, cancelled calls, and an end without waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import pytest

from service.gateway.core.text_threads import NUM_THREADS, TextThreads
from tests.support.source_tree import ROOT


@asynccontextmanager
async def open_threads():
    threads = TextThreads()
    try:
        yield threads
    finally:
        threads.close()


async def until(is_so) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.005)


async def test_it_returns_and_raises_what_the_call_does():
    async with open_threads() as threads:
        assert await threads.run("a", divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", divmod, 7, 0)


async def test_a_tenant_leaves_a_thread_to_others_and_they_take_turns():
    release, order = threading.Event(), []
    async with open_threads() as threads:
        greedy = [asyncio.create_task(threads.run("greedy", release.wait)) for _ in range(20)]
        await until(lambda: threads._running.total() == NUM_THREADS - 1)
        assert await threads.run("modest", lambda: 5) == 5
        assert await threads.responds(20)
        blocked = asyncio.create_task(threads.run("third", release.wait))
        await until(lambda: threads._running.total() == NUM_THREADS)
        assert not await threads.responds(0.05)
        late = [asyncio.create_task(threads.run("modest", order.append, "modest")) for _ in range(2)]
        release.set()
        await asyncio.gather(*greedy, *late, blocked)
        assert order == ["modest", "modest"]
        assert await threads.responds(20)


async def test_one_that_is_not_waited_for_gives_up_its_place():
    release, called = threading.Event(), []
    async with open_threads() as threads:
        busy = [asyncio.create_task(threads.run("a", release.wait)) for _ in range(NUM_THREADS - 1)]
        await until(lambda: threads._running.total() == NUM_THREADS - 1)
        waiting = [asyncio.create_task(threads.run("a", called.append, i)) for i in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.wait({waiting[1]})
        release.set()
        await asyncio.gather(*busy, waiting[0], waiting[2])
        assert sorted(called) == [0, 2]


PROGRAM = """
import asyncio, threading
from service.gateway.core.text_threads import TextThreads
async def main():
    threads = TextThreads()
    asyncio.create_task(threads.run("a", threading.Event().wait))
    while not threads._running:
        await asyncio.sleep(0.01)
    threads.close()
asyncio.run(main())
"""


def test_the_process_ends_whatever_runs():
    assert subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, timeout=60, check=False).returncode == 0

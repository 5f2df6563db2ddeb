"""The clock of Redis' machine jumps by an hour under a real gateway and worker: no request fails."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from service.config.settings import Settings
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from tests.support.demo_engine import DEMO
from tests.support.fleet import Fleet
from tests.support.queue_pair import open_pair
from tests.support.served import REPOSITORY

COMPILER, SERVER = shutil.which("cc"), shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = [
    pytest.mark.skipif(COMPILER is None or SERVER is None, reason="no C compiler or no Redis server here"),
    pytest.mark.timeout(120),
]
AN_HOUR = 3600
WATCHED_S = 6.0


class SetRedis:
    """A server whose clock is `set`."""

    def __init__(self, folder: Path) -> None:
        library, self._shift = folder / "set_clock.so", folder / "shift"
        source = REPOSITORY / "tests" / "support" / "set_clock.c"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        self._shift.write_text("0")
        socket = folder / "redis.sock"
        self.url = f"unix://{socket}"
        self.process = subprocess.Popen(
            [SERVER, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)],
            env={**os.environ, "LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._shift)},
            stdout=subprocess.DEVNULL,
        )

    def set(self, by_s: int) -> None:
        self._shift.write_text(str(by_s))

    def time_s(self) -> int:
        with Redis.from_url(self.url) as redis:
            return redis.time()[0]

    async def until_up(self) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    self.time_s()
                    return
                except RedisConnectionError:
                    await asyncio.sleep(0.05)


@pytest.fixture
def set_redis(tmp_path: Path) -> Iterator[SetRedis]:
    server = SetRedis(tmp_path)
    yield server
    server.process.terminate()
    server.process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "fleet").mkdir()
    made = Fleet(tmp_path / "fleet", lease_s=3.0)
    yield made
    made.close()


@pytest.mark.parametrize("by_s", [AN_HOUR, -AN_HOUR])
async def test_no_request_fails_and_no_worker_counts_as_dead(set_redis, fleet, by_s):
    await set_redis.until_up()
    fleet.redis_url = set_redis.url
    await fleet.have(2)
    queue = await open_pair(set_redis.url)
    settings = Settings(model=DEMO, served_model_name="demo", port=0, drain_timeout=1.0)
    async with serving(settings, ServedModel.read(settings), queue) as url, aiohttp.ClientSession() as http:

        async def ask(num_tokens: int) -> tuple[int, str]:
            body = {"model": "demo", "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                return response.status, answer["choices"][0]["text"] if response.status == 200 else answer

        async def is_ready() -> bool:
            async with http.get(f"{url}/readyz") as response:
                return response.status == 200

        async with asyncio.timeout(30):
            while not await is_ready():
                await asyncio.sleep(0.1)
        _, golden = await ask(8)
        running = [asyncio.create_task(ask(100)) for _ in range(4)]
        before_s = set_redis.time_s()
        set_redis.set(by_s)
        assert abs(set_redis.time_s() - before_s - by_s) < 10
        loop = asyncio.get_running_loop()
        give_up_s, answers = loop.time() + WATCHED_S, []
        while loop.time() < give_up_s:
            answers.append(await ask(8))
            await asyncio.sleep(0.05)
        assert answers == [(200, golden)] * len(answers)
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 4
        assert await is_ready()
    await queue.close()
    assert "jobs of dead workers" not in fleet.output
    assert "lost to other workers" not in fleet.output

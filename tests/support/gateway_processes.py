"""Gateways on one real Redis, in this process or in their own, for measurements."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from service.config.settings import Settings
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.gateway import MODEL, speech, write_model
from tests.support.queue_pair import open_pair


@dataclass(frozen=True)
class GatewayFleet:
    urls: Sequence[str]
    worker: ScriptedWorker
    model: ServedModel


@asynccontextmanager
async def open_fleet(
    redis_url: str, folder: Path, num_gateways: int, worker_type=ScriptedWorker, **settings
) -> AsyncIterator[GatewayFleet]:
    """Open gateways and a worker, each with its own connections to Redis. Makes `folder` if missing."""
    if not (folder / "config.json").exists():
        write_model(folder)
    chosen = Settings(**{"model": folder, "served_model_name": MODEL, "port": 0, "drain_timeout": 1.0, **settings})
    model = ServedModel.read(chosen)
    async with AsyncExitStack() as opened:

        async def queue():
            found = await open_pair(redis_url)
            opened.push_async_callback(found.close)
            return found

        worker = worker_type(await queue(), MODEL, lambda job: speech(model, "Hello world."))
        await opened.enter_async_context(worker.working())
        urls = [await opened.enter_async_context(serving(chosen, model, await queue())) for _ in range(num_gateways)]
        yield GatewayFleet(urls, worker, model)


def start_gateway(redis_url: str, folder: Path, **flags: object) -> tuple[subprocess.Popen, int]:
    """Start `quire gateway` as a process; return it and its port."""
    if not (folder / "config.json").exists():
        write_model(folder)
    given = {
        "redis_url": redis_url,
        "model": folder,
        "served_model_name": MODEL,
        "port": 0,
        "drain_timeout": 5,
        **flags,
    }
    command = [sys.executable, "-m", "service.cli.entry", "gateway"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in gateway.stdout:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            return gateway, int(found[1])
    raise AssertionError("the gateway did not start")

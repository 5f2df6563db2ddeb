"""Several gateways over one real Redis, with a scripted worker: what the measures of the doors run on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from service.config import Settings
from service.gateway.process import serving
from service.gateway.served_model import ServedModel
from service.wire.redis_broker import open_redis_broker
from tests.support.gateway import MODEL, speech, write_model
from tests.support.scripted_worker import ScriptedWorker


@dataclass(frozen=True)
class GatewayFleet:
    urls: Sequence[str]
    worker: ScriptedWorker
    model: ServedModel


@asynccontextmanager
async def open_fleet(
    redis_url: str, folder: Path, num_gateways: int, worker_type=ScriptedWorker, **settings
) -> AsyncIterator[GatewayFleet]:
    """Each gateway has its own connections to Redis, and so has the worker. `folder` is made if it is not there."""
    if not (folder / "config.json").exists():
        write_model(folder)
    chosen = Settings(**{"model": folder, "served_model_name": MODEL, "port": 0, "drain_timeout": 1.0, **settings})
    model = ServedModel.read(chosen)
    async with AsyncExitStack() as opened:

        async def broker():
            found = await open_redis_broker(redis_url)
            opened.push_async_callback(found.close)
            return found

        worker = worker_type(await broker(), MODEL, lambda job: speech(model, "Hello world."))
        await opened.enter_async_context(worker.working())
        urls = [await opened.enter_async_context(serving(chosen, model, await broker())) for _ in range(num_gateways)]
        yield GatewayFleet(urls, worker, model)

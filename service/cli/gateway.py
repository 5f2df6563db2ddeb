"""`quire gateway`: a gateway on an existing Redis, or several on one port."""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack

from service.cli.lifecycle import READY, open_queue, opened_tracing, run_until_signalled, supervised
from service.cli.processes.gateways import open_gateways
from service.config.settings import Settings
from service.gateway.process import run_gateway
from service.observability.gateway_group import GatewayGroup
from service.observability.systemd import Supervisor
from service.queue.redis.connect import open_gateway_queue
from service.shutdown import Shutdown


def gateway_command(settings: Settings, _: argparse.Namespace) -> int:
    """Run a gateway, or the parent of several. Return the exit status. Raises StartupError."""
    if settings.api_server_count > 1:
        return run_until_signalled(lambda stop: _run_group(settings, stop))

    supervisor = Supervisor(os.environ)

    def on_ready(url: str) -> None:
        print(READY, url, flush=True)
        supervisor.ready(f"listening on {url}")

    async def run(stop: Shutdown) -> None:
        async with (
            supervised(supervisor, stop, by_loop=True),
            open_queue(settings, open_gateway_queue) as queue,
            opened_tracing("gateway") as tracing,
        ):
            await run_gateway(
                settings, queue, stop, on_ready=on_ready, tracing=tracing, group=GatewayGroup.find(os.environ)
            )

    return run_until_signalled(run)


async def _run_group(settings: Settings, stop: Shutdown) -> int:
    supervisor = Supervisor(os.environ)
    async with supervised(supervisor, stop, by_loop=True), AsyncExitStack() as exits:
        gateways = exits.enter_context(open_gateways(settings))
        exits.push_async_callback(gateways.stop, stop.at_once)
        await gateways.start()
        stopped = asyncio.create_task(stop.wait())
        started = asyncio.create_task(gateways.wait_ready())
        done, _ = await asyncio.wait({stopped, started}, return_when=asyncio.FIRST_COMPLETED)
        if started in done and not stop.is_set():
            url = started.result()[0]
            print(READY, url, flush=True)
            supervisor.ready(f"{settings.api_server_count} gateways listening on {url}")
            restarting = asyncio.create_task(gateways.keep_running())
            exits.callback(restarting.cancel)
            await asyncio.wait({stopped, restarting}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)
        return 0 if stop.is_set() else 1

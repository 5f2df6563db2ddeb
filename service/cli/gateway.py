"""`quire gateway`: a gateway on an existing Redis."""

from __future__ import annotations

import argparse
import asyncio
import os

from service.cli.roles import READY, open_queue, opened_tracing, run_until_signalled, supervised
from service.config.settings import Settings
from service.gateway.process import run_gateway
from service.observability.systemd import Supervisor
from service.queue.redis.connect import open_gateway_queue


def gateway_command(settings: Settings, _: argparse.Namespace) -> int:
    """Run a gateway; return the exit status. Raises StartupError."""

    supervisor = Supervisor(os.environ)

    def on_ready(url: str) -> None:
        print(READY, url, flush=True)
        supervisor.ready(f"listening on {url}")

    async def run(stop: asyncio.Event) -> None:
        async with (
            supervised(supervisor, stop, by_loop=True),
            open_queue(settings, open_gateway_queue) as queue,
            opened_tracing("gateway") as tracing,
        ):
            await run_gateway(settings, queue, stop, on_ready=on_ready, tracing=tracing)

    return run_until_signalled(run)

"""`quire worker`: a worker on an existing Redis."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from functools import partial

from service.cli.lifecycle import READY, open_queue, opened_tracing, run_until_signalled, supervised
from service.config.settings import Settings
from service.observability.systemd import Supervisor
from service.queue.redis.connect import open_worker_queue
from service.shutdown import Shutdown
from service.worker.process import EngineDied, run_worker

log = logging.getLogger("quire.cli")


def worker_command(settings: Settings, _: argparse.Namespace) -> int:
    """Run a worker. Return the exit status, 1 if the engine died. Raises StartupError."""

    supervisor = Supervisor(os.environ)

    def on_ready() -> None:
        print(READY, flush=True)
        supervisor.ready("taking jobs")

    async def run(stop: Shutdown) -> None:
        async with (
            supervised(supervisor, stop, by_loop=False),
            open_queue(settings, partial(open_worker_queue, lease_s=settings.lease)) as queue,
            opened_tracing("worker") as tracing,
        ):
            await run_worker(settings, queue, stop, supervisor, on_ready, tracing)

    try:
        return run_until_signalled(run)
    except EngineDied as death:
        log.critical("the engine died", exc_info=death.__cause__)
        sys.stdout.flush()
        logging.shutdown()
        os._exit(1)  # cleaning up would wait for a device or thread that never responds

"""`quire serve`: an embedded Redis (unless --redis-url is given), gateways and workers.

Redis, workers, and gateways if there are several, are restarted when they crash; requests wait and continue.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import replace

from service.cli.lifecycle import run_until_signalled, supervised
from service.cli.processes.children import ChildGroup
from service.cli.processes.gateways import open_gateways, require_ports
from service.cli.processes.workers import devices_of_workers, make_workers, visible_devices
from service.config.settings import GATEWAY, WORKER, Settings
from service.errors import StartupError
from service.observability.logs import fields
from service.observability.systemd import Supervisor
from service.queue.embedded.redis import EmbeddedRedis
from service.queue.process_name import own_name
from service.shutdown import Shutdown

log = logging.getLogger("quire.serve")

ONLY_WORKER = "serve"
"""A fixed worker name, so that a restarted worker resumes its predecessor's jobs at once."""

RESTART_S = 0.2
"""Delay before restarting Redis."""


def serve_command(settings: Settings, _: argparse.Namespace) -> int:
    return run_until_signalled(lambda stop: _serve(settings, stop))


async def _serve(settings: Settings, stop: Shutdown) -> int:
    supervisor = Supervisor(os.environ)
    ends: dict[asyncio.Task[int], str] = {}
    devices = devices_of_workers(settings, os.environ, visible_devices(os.environ))
    require_ports(settings)
    async with supervised(supervisor, stop, by_loop=True), AsyncExitStack() as exits:
        if settings.redis_url is None:
            if settings.redis_password_file is not None:
                raise StartupError("--redis-password-file: --redis-url is missing")
            redis = await asyncio.to_thread(EmbeddedRedis.start, settings.data_dir)
            exits.push_async_callback(asyncio.to_thread, redis.stop)
            settings = replace(settings, redis_url=redis.url, worker_name=ONLY_WORKER)
            restarting = asyncio.create_task(_keep_running(redis))
            exits.callback(restarting.cancel)
            ends[restarting] = "redis"
        workers = make_workers(settings, settings.worker_name or own_name(), devices, os.environ)
        gateways = exits.enter_context(open_gateways(settings))
        for group in (workers, gateways):
            exits.push_async_callback(group.stop, stop.at_once)
            await group.start()

        stopped = asyncio.create_task(stop.wait())
        started = asyncio.create_task(_all_ready(gateways, workers))
        done, _ = await asyncio.wait({stopped, started}, return_when=asyncio.FIRST_COMPLETED)
        if started in done and not stop.is_set():
            _greet(settings, started.result())
            for group, name in ((workers, WORKER), (gateways, GATEWAY)):
                restarting = asyncio.create_task(group.keep_running())
                exits.callback(restarting.cancel)
                ends[restarting] = name
            supervisor.ready(f"serving at {started.result()}")
            done, _ = await asyncio.wait({stopped, *ends}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)  # Ctrl-C may have killed a child too
        dead = [name for task, name in ends.items() if task in done]
        if dead and not stop.is_set():
            status = next(task.result() for task in ends if task in done)
            if status == 0:  # the only gateway was stopped by a signal
                log.info("stopping with its process %s", fields(process=dead[0]))
                return 0
            log.critical("a process ended by itself %s", fields(process=dead[0], exit_status=status))
            return 1
        log.info("stopping; a second Ctrl-C ends it at once %s", fields(drain_timeout_s=settings.drain_timeout))
    return 0


async def _keep_running(redis: EmbeddedRedis) -> int:
    """Restart Redis at the same address whenever it ends. Return 1 if a restart fails."""
    while True:
        await asyncio.to_thread(redis.wait)
        log.error("embedded redis ended by itself; restarting")
        await asyncio.sleep(RESTART_S)
        try:
            await asyncio.to_thread(redis.restart)
        except StartupError as error:
            log.critical("%s", error)
            return 1


async def _all_ready(gateways: ChildGroup, workers: ChildGroup) -> str:
    urls, _ = await asyncio.gather(gateways.wait_ready(), workers.wait_ready())
    return urls[0]


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _greet(settings: Settings, url: str) -> None:
    assert settings.redis_url is not None
    name = settings.model_names[0]
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    print(
        f"""
Quire serves {name} at {url}
Queue producers: {_without_password(settings.redis_url)}

  curl {url}/v1/chat/completions{auth} -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Tell me a story about a fox."}}]}}'

Ctrl-C stops it.""",
        flush=True,
    )

"""`quire serve`: an embedded Redis (unless --redis-url is given), a gateway and a worker.

Redis and the worker are restarted when they crash; requests wait and continue.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from service.cli.roles import READY, run_until_signalled, supervised
from service.config.settings import GATEWAY, WORKER, Settings
from service.config.sources import NO_CONFIG_FILE, to_flags, to_secret_environ
from service.errors import StartupError
from service.import_root import python_path
from service.observability.logs import fields
from service.observability.systemd import VARIABLES as SUPERVISOR_VARIABLES
from service.observability.systemd import Supervisor
from service.queue.embedded.die_with_parent import die_with_parent
from service.queue.embedded.redis import EmbeddedRedis
from service.queue.redis.connect import own_name

log = logging.getLogger("quire.serve")

MAIN = f"{__name__.rpartition('.')[0]}.main"

EXIT_GRACE_S = 10.0
"""Time after the drain time before a child is killed."""

ONLY_WORKER = "serve"
"""Worker name: a restarted worker resumes its predecessor's jobs at once."""

RESTART_S = 0.2
"""Delay of Redis's restart."""

WORKER_RESTARTS_S = (0.2, 1.0, 3.0, 10.0, 30.0)
"""Delays of the worker's restarts; then the service ends. A request is dead-lettered after killing 3 engines."""

WORKER_WELL_S = 60.0
"""Ready time after which the delays begin again."""

BLAS_THREADS = {"OPENBLAS_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1))}
"""Spinning BLAS threads leave one core to the gateway and Redis."""
CRASHES_ARE_SEEN = {"PYTHONFAULTHANDLER": "1"}
"""A crash in native code prints where each thread was."""


class ChildProcess:
    def __init__(self, verb: str, process: asyncio.subprocess.Process, grace_s: float) -> None:
        self.verb = verb
        self._process = process
        self._grace_s = grace_s

    @classmethod
    async def start(cls, verb: str, settings: Settings) -> ChildProcess:
        """Start `quire <verb>` in its own session, so that Ctrl-C reaches it only through this process."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            MAIN,
            verb,
            *to_flags(settings, verb),
            env={
                **BLAS_THREADS,
                **CRASHES_ARE_SEEN,
                **{name: value for name, value in os.environ.items() if name not in SUPERVISOR_VARIABLES},
                **to_secret_environ(settings),
                **NO_CONFIG_FILE,
                "PYTHONPATH": python_path(os.environ),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return cls(verb, process, settings.drain_timeout + EXIT_GRACE_S)

    async def wait_ready(self) -> str:
        """Return the rest of the child's ready line. Raises StartupError if the child ends before."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word == READY:
                return rest
        status = await self._process.wait()
        raise StartupError(f"{self.verb}: did not start (exit status {status}; see its own error above)")

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        """Send SIGTERM, wait for the drain time, then send SIGKILL."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s):
                await self._process.wait()
        except TimeoutError:
            log.error("killed %s", fields(process=self.verb))
            self._process.kill()
            await self._process.wait()


class RestartingWorker:
    """Worker that is restarted under the same name, so that it resumes its jobs at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._child: ChildProcess | None = None

    async def start(self) -> None:
        self._child = await ChildProcess.start(WORKER, self._settings)

    async def wait_ready(self) -> None:
        """Wait for the first start. Raises StartupError."""
        await self._started_child().wait_ready()

    async def keep_running(self) -> None:
        """Restart the worker whenever it ends. Return once it has ended too often."""
        num_ends, ready_at_s = 0, time.monotonic()
        while True:
            status = await self._started_child().wait()
            num_ends = 1 if ready_at_s and time.monotonic() - ready_at_s > WORKER_WELL_S else num_ends + 1
            if num_ends > len(WORKER_RESTARTS_S):
                log.critical("worker ended too often %s", fields(exit_status=status, times=num_ends))
                return
            wait_s, ready_at_s = WORKER_RESTARTS_S[num_ends - 1], 0.0
            log.error("worker ended by itself; restarting %s", fields(exit_status=status, wait_s=wait_s))
            await asyncio.sleep(wait_s)
            await self.start()
            try:
                await self.wait_ready()
                ready_at_s = time.monotonic()
            except StartupError as error:
                log.error("%s", error)

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()

    def _started_child(self) -> ChildProcess:
        assert self._child is not None
        return self._child


def serve_command(settings: Settings, _: argparse.Namespace) -> int:
    return run_until_signalled(lambda stop: _serve(settings, stop))


async def _serve(settings: Settings, stop: asyncio.Event) -> int:
    supervisor = Supervisor(os.environ)
    ends: dict[asyncio.Task[Any], str] = {}
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
        worker = RestartingWorker(replace(settings, worker_name=settings.worker_name or own_name()))
        exits.push_async_callback(worker.stop)
        await worker.start()
        gateway = await ChildProcess.start(GATEWAY, settings)
        exits.push_async_callback(gateway.stop)

        stopped = asyncio.create_task(stop.wait())
        started = asyncio.create_task(_all_ready(gateway, worker))
        ends[asyncio.create_task(gateway.wait())] = GATEWAY
        done, _ = await asyncio.wait({stopped, started}, return_when=asyncio.FIRST_COMPLETED)
        if started in done and not stop.is_set():
            _greet(settings, started.result())
            restarting = asyncio.create_task(worker.keep_running())
            exits.callback(restarting.cancel)
            ends[restarting] = WORKER
            supervisor.ready(f"serving at {started.result()}")
            done, _ = await asyncio.wait({stopped, *ends}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)  # Ctrl-C may have ended a child too
        dead = [name for task, name in ends.items() if task in done]
        if dead and not stop.is_set():
            status = next(task.result() for task in ends if task in done)
            log.critical("a process ended by itself %s", fields(process=dead[0], exit_status=status))
            return 1
        log.info("stopping")
    return 0


async def _keep_running(redis: EmbeddedRedis) -> None:
    """Restart Redis at the same address. Return if a restart fails."""
    while True:
        await asyncio.to_thread(redis.wait)
        log.error("embedded redis ended by itself; restarting")
        await asyncio.sleep(RESTART_S)
        try:
            await asyncio.to_thread(redis.restart)
        except StartupError as error:
            log.critical("%s", error)
            return


async def _all_ready(gateway: ChildProcess, worker: RestartingWorker) -> str:
    url, _ = await asyncio.gather(gateway.wait_ready(), worker.wait_ready())
    return url


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

"""`quire serve`: an embedded Redis where none is given, one gateway, one worker; all of them end together.

Redis and the worker are started again where they end by themselves: requests wait for them and go on.
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
from pathlib import Path

from service.cli.roles import READY, run_until_signalled
from service.cli.supervised import supervised
from service.config.settings import GATEWAY, WORKER, Settings
from service.config.sources import NO_CONFIG_FILE, to_flags, to_secret_environ
from service.errors import StartupError
from service.observability.logs import fields
from service.observability.systemd import VARIABLES as SUPERVISOR_VARIABLES
from service.observability.systemd import Supervisor
from service.queue.embedded.die_with_parent import die_with_parent
from service.queue.embedded.redis import EmbeddedRedis
from service.queue.redis.queue import own_name

log = logging.getLogger("quire.serve")

EXIT_GRACE_S = 10.0
"""What a part gets on top of its drain time before it is killed."""

ONLY_WORKER = "serve"
"""The name of the worker on a Redis that nobody else has: a new one takes up at once what the last one left."""

RESTART_S = 0.2
"""Between the end of the embedded Redis and the next one's start."""

WORKER_RESTARTS_S = (0.2, 1.0, 3.0, 10.0, 30.0)
"""Between the worker's end and its next start, where it ends again and again; then it is given up. A request that kills
engines is found out by its third."""

WORKER_WELL_S = 60.0
"""A worker that was ready for so long was well: its end is the first again."""

BLAS_THREADS = {"OPENBLAS_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1))}
"""One core stays free of the spinning threads of a matrix product: the gateway and Redis run beside the worker."""


class Part:
    """A child process that runs one verb."""

    def __init__(self, verb: str, process: asyncio.subprocess.Process, grace_s: float):
        self.verb = verb
        self._process = process
        self._grace_s = grace_s

    @classmethod
    async def start(cls, verb: str, settings: Settings) -> Part:
        """Start `quire <verb>` with these settings, in a session of its own, so that Ctrl-C reaches it through us."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "service.cli.main",
            verb,
            *to_flags(settings, verb),
            env={
                **BLAS_THREADS,
                **{name: value for name, value in os.environ.items() if name not in SUPERVISOR_VARIABLES},
                **to_secret_environ(settings),
                **NO_CONFIG_FILE,
                "PYTHONPATH": _module_path(),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return cls(verb, process, settings.drain_timeout + EXIT_GRACE_S)

    async def ready(self) -> str:
        """What stands behind the word on the part's ready line. Raises StartupError if the part ends before."""
        async for line in self._process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word == READY:
                return rest
        status = await self._process.wait()
        raise StartupError(f"the {self.verb} did not start (exit status {status}); its own line stands above")

    async def ended(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, its drain time, then SIGKILL."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s):
                await self._process.wait()
        except TimeoutError:
            log.error("killed %s", fields(part=self.verb))
            self._process.kill()
            await self._process.wait()


class KeptWorker:
    """The worker, started again where it ends by itself. Under one name: the next takes up at once what it left."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._part: Part | None = None

    async def start(self) -> None:
        self._part = await Part.start(WORKER, self._settings)

    async def ready(self) -> None:
        """Raises StartupError."""
        await self._part.ready()

    async def keep(self) -> None:
        """Returns once it has ended too often."""
        num_ends, ready_at_s = 0, time.monotonic()
        while True:
            status = await self._part.ended()
            num_ends = 1 if ready_at_s and time.monotonic() - ready_at_s > WORKER_WELL_S else num_ends + 1
            if num_ends > len(WORKER_RESTARTS_S):
                log.critical("the worker ended again and again %s", fields(exit_status=status, times=num_ends))
                return
            wait_s, ready_at_s = WORKER_RESTARTS_S[num_ends - 1], 0.0
            log.error("the worker ended by itself, and starts again %s", fields(exit_status=status, wait_s=wait_s))
            await asyncio.sleep(wait_s)
            await self.start()
            try:
                await self.ready()
                ready_at_s = time.monotonic()
            except StartupError as error:
                log.error("%s", error)

    async def stop(self) -> None:
        if self._part is not None:
            await self._part.stop()


def serve_command(settings: Settings, _: argparse.Namespace) -> int:
    return run_until_signalled(lambda stop: _serve(settings, stop))


async def _serve(settings: Settings, stop: asyncio.Event) -> int:
    supervisor = Supervisor(os.environ)
    ends: dict[asyncio.Task, str] = {}
    async with supervised(supervisor, stop, by_loop=True), AsyncExitStack() as exits:
        if settings.redis_url is None:
            if settings.redis_password_file is not None:
                raise StartupError("--redis-password-file is of no use without --redis-url")
            redis = await asyncio.to_thread(EmbeddedRedis.start, settings.data_dir)
            exits.push_async_callback(asyncio.to_thread, redis.stop)
            settings = replace(settings, redis_url=redis.url, worker_name=ONLY_WORKER)
            kept = asyncio.create_task(_keep(redis))
            exits.callback(kept.cancel)
            ends[kept] = "redis"
        worker = KeptWorker(replace(settings, worker_name=settings.worker_name or own_name()))
        exits.push_async_callback(worker.stop)
        await worker.start()
        gateway = await Part.start(GATEWAY, settings)
        exits.push_async_callback(gateway.stop)

        stopped = asyncio.create_task(stop.wait())
        started = asyncio.create_task(_all_ready(gateway, worker))
        ends[asyncio.create_task(gateway.ended())] = GATEWAY
        done, _ = await asyncio.wait({stopped, started}, return_when=asyncio.FIRST_COMPLETED)
        if started in done and not stop.is_set():
            _greet(settings, started.result())
            kept = asyncio.create_task(worker.keep())
            exits.callback(kept.cancel)
            ends[kept] = WORKER
            supervisor.ready(f"serves at {started.result()}")
            done, _ = await asyncio.wait({stopped, *ends}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)  # the same Ctrl-C may have ended a part before it began
        dead = [name for task, name in ends.items() if task in done]
        if dead and not stop.is_set():
            log.critical("a part ended by itself %s", fields(part=dead[0]))
            return 1
        log.info("stopping")
    return 0


async def _keep(redis: EmbeddedRedis) -> None:
    """Starts it again whenever it ends by itself; the parts find it where it was. Returns where that cannot be done."""
    while True:
        await asyncio.to_thread(redis.wait)
        log.error("the embedded redis ended by itself, and starts again")
        await asyncio.sleep(RESTART_S)
        try:
            await asyncio.to_thread(redis.restart)
        except StartupError as error:
            log.critical("%s", error)
            return


async def _all_ready(gateway: Part, worker: KeptWorker) -> str:
    url, _ = await asyncio.gather(gateway.ready(), worker.ready())
    return url


def _module_path() -> str:
    """Ours first, and the folder we were started in not at all: it may hold a `model` or `service` of its own."""
    ours = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _greet(settings: Settings, url: str) -> None:
    name = settings.served_model_name or settings.model.name
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

"""Child processes: start, readiness, restarts, shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from service.cli.lifecycle import AT_ONCE, EXIT_AT_ONCE, READY, REFUSED, STARTED_BY_SERVE
from service.config.settings import Settings
from service.config.sources import NO_CONFIG_FILE, to_flags, to_secret_environ
from service.errors import StartupError
from service.import_root import python_path
from service.observability.logs import PROCESS_NAME, fields
from service.observability.systemd import VARIABLES as SUPERVISOR_VARIABLES
from service.queue.embedded.die_with_parent import die_with_parent

log = logging.getLogger("quire.serve")

ENTRY = f"{__name__.removesuffix('.processes.children')}.entry"

EXIT_GRACE_S = 10.0
"""Time after the drain timeout until a child is killed."""

RESTARTS_S = (0.2, 1.0, 3.0, 10.0, 30.0)
"""Delays between a child's restarts, after which it is given up. A request is dead-lettered after killing 3 engines."""

WELL_S = 60.0
"""Ready time after which the restart delays start over."""

STOPPED = (0, EXIT_AT_ONCE, -signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a child that stopped on a signal."""

CRASHES_ARE_SEEN = {"PYTHONFAULTHANDLER": "1"}
"""A native crash prints every thread's stack."""

NO_VARIABLES: Mapping[str, str] = {}


OnEnd = Callable[[int], Awaitable[None]]


class ChildProcess:
    def __init__(self, name: str, process: asyncio.subprocess.Process, grace_s: float) -> None:
        self.pid = process.pid
        self._name = name
        self._process = process
        self._grace_s = grace_s

    @classmethod
    async def start(cls, verb: str, settings: Settings, environ: Mapping[str, str] = NO_VARIABLES) -> ChildProcess:
        """Start `quire <verb>` in its own session, so that Ctrl-C reaches it only through us. `environ` is added."""
        inherited = {name: value for name, value in os.environ.items() if name not in SUPERVISOR_VARIABLES}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            ENTRY,
            verb,
            *to_flags(settings, verb),
            env={
                **CRASHES_ARE_SEEN,
                **inherited,
                **environ,
                **to_secret_environ(settings),
                **NO_CONFIG_FILE,
                STARTED_BY_SERVE: "1",
                "PYTHONPATH": python_path(os.environ),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return cls(environ.get(PROCESS_NAME, verb), process, settings.drain_timeout + EXIT_GRACE_S)

    async def wait_ready(self) -> str:
        """Return the rest of the child's ready line. Raises StartupError, with the child's error, if it exits first."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word == READY:
                return rest
            if word == REFUSED:
                await self._process.wait()
                raise StartupError(rest)
        status = await self._process.wait()
        if status < 0:
            raise StartupError(f"{self._name}: did not start (ended by {signal.Signals(-status).name})")
        raise StartupError(f"{self._name}: did not start (exit status {status}; see its own error above)")

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, at_once: asyncio.Event) -> None:
        """Send SIGTERM, and AT_ONCE once `at_once` is set. Send SIGKILL after the drain timeout."""
        self._send(signal.SIGTERM)
        hurrying = asyncio.create_task(self._hurry(at_once))
        try:
            async with asyncio.timeout(self._grace_s):
                await self._process.wait()
        except TimeoutError:
            log.error("killed %s", fields(process=self._name))
            self._process.kill()
            await self._process.wait()
        finally:
            hurrying.cancel()

    async def _hurry(self, at_once: asyncio.Event) -> None:
        await at_once.wait()
        self._send(AT_ONCE)

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)


class RestartingChild:
    def __init__(
        self,
        verb: str,
        settings: Settings,
        environ: Mapping[str, str] = NO_VARIABLES,
        restarts_s: Sequence[float] = RESTARTS_S,
        on_end: OnEnd | None = None,
    ) -> None:
        """`restarts_s`: restart delays. `on_end` gets the pid of a child that exited."""
        self._verb = verb
        self._settings = settings
        self._environ = environ
        self._restarts_s = restarts_s
        self._on_end = on_end
        self._child: ChildProcess | None = None

    async def start(self) -> None:
        self._child = await ChildProcess.start(self._verb, self._settings, self._environ)

    async def wait_ready(self) -> str:
        """Wait for the ready line. Raises StartupError."""
        return await self._started_child().wait_ready()

    async def keep_running(self) -> int:
        """Restart the child as needed; return its exit status once it is given up. Stops by a signal do not count."""
        num_ends, ready_at_s = 0, time.monotonic()
        while True:
            child = self._started_child()
            status = await child.wait()
            if self._on_end is not None:
                await self._on_end(child.pid)
            if status not in STOPPED:
                num_ends = 1 if ready_at_s and time.monotonic() - ready_at_s > WELL_S else num_ends + 1
            wait_s, ready_at_s = self._restart_delay_s(status, num_ends), 0.0
            if wait_s is None:
                return status
            await asyncio.sleep(wait_s)
            await self.start()
            try:
                await self.wait_ready()
                ready_at_s = time.monotonic()
            except StartupError as error:
                log.error("%s was not restarted: %s %s", self._verb, error, self._shown())

    async def stop(self, at_once: asyncio.Event) -> None:
        if self._child is not None:
            await self._child.stop(at_once)

    def _restart_delay_s(self, status: int, num_ends: int) -> float | None:
        """Return and log the restart delay; None: no restart."""
        if status in STOPPED:
            then = "; restarting" if self._restarts_s else ""
            log.info("%s was stopped%s %s", self._verb, then, self._shown(exit_status=status))
            return 0.0 if self._restarts_s else None
        if num_ends > len(self._restarts_s):
            log.critical("%s ended; not restarted %s", self._verb, self._shown(exit_status=status, times=num_ends))
            return None
        wait_s = self._restarts_s[num_ends - 1]
        log.error("%s ended by itself; restarting %s", self._verb, self._shown(exit_status=status, wait_s=wait_s))
        return wait_s

    def _shown(self, **values: float) -> str:
        name = self._environ.get(PROCESS_NAME)
        return fields(**({} if name is None else {"process": name}), **values)

    def _started_child(self) -> ChildProcess:
        assert self._child is not None
        return self._child


class ChildGroup:
    """Children of one kind. The group runs as long as any child does."""

    def __init__(self, children: Sequence[RestartingChild]) -> None:
        self._children = children

    async def start(self) -> None:
        for child in self._children:
            await child.start()

    async def wait_ready(self) -> Sequence[str]:
        """Wait for all ready lines. Raises StartupError."""
        return await asyncio.gather(*(child.wait_ready() for child in self._children))

    async def keep_running(self) -> int:
        """Return an exit status once no child is restarted: a failed child's, if any."""
        statuses = await asyncio.gather(*(child.keep_running() for child in self._children))
        return next((status for status in statuses if status not in STOPPED), 0)

    async def stop(self, at_once: asyncio.Event) -> None:
        await asyncio.gather(*(child.stop(at_once) for child in self._children))

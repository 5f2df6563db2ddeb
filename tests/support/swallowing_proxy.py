"""A proxy in front of Redis that loses commands and answers, by command."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from hashlib import sha1
from urllib.parse import unquote, urlsplit

import hiredis

from service.queue.redis.link import COMMON_SCRIPTS, script_of, script_paths

BLOCKING = frozenset({"XREAD", "XREADGROUP"})
HANDSHAKE = frozenset({"HELLO", "AUTH", "CLIENT", "SELECT", "INFO", "ROLE", "PING"})


class Fate(Enum):
    """Fate of a command."""

    ANSWERED = "answered"
    SWALLOWED = "swallowed"  # Redis executes it; its answer is dropped, and the connection closed
    LATE = "late"  # Redis executes it; its answer arrives after the client's timeout
    LOST = "lost"  # Redis never sees it; the connection is closed


Choose = Callable[[str], Fate]


def answered(_: str) -> Fate:
    return Fate.ANSWERED


def at_random(dice: random.Random, share: float, but: frozenset[str] = BLOCKING | HANDSHAKE) -> Choose:
    """Return a choice of faults for this share of commands, except those named."""

    def choose(name: str) -> Fate:
        if name in but or dice.random() >= share:
            return Fate.ANSWERED
        return dice.choices((Fate.SWALLOWED, Fate.LATE, Fate.LOST), (6, 1, 1))[0]

    return choose


def once(*names: str, fate: Fate = Fate.SWALLOWED) -> Choose:
    """Return a choice of faults for the first of each of these commands."""
    left = set(names)

    def choose(name: str) -> Fate:
        if name not in left:
            return Fate.ANSWERED
        left.remove(name)
        return fate

    return choose


def script_names() -> dict[bytes, str]:
    """Return the names of the queue's scripts by digest."""
    return {script_of(name)[1].encode(): name for name in script_paths() if name not in COMMON_SCRIPTS}


class SwallowingProxy:
    """Proxy; `choose` returns the fate of each command, by its name or its script's; `counts` counts fates."""

    def __init__(self, url: str, choose: Choose = answered, late_s: float = 1.5) -> None:
        parts = urlsplit(url)
        self._behind = unquote(parts.path) if parts.scheme == "unix" else (parts.hostname, parts.port)
        self.choose = choose
        self.counts: Counter[tuple[str, Fate]] = Counter()
        self.url = ""
        self._late_s = late_s
        self._scripts = script_names()
        self._open: set[asyncio.Task[None]] = set()

    def num_faults(self, name: str | None = None) -> int:
        return sum(
            count for (of, fate), count in self.counts.items() if fate is not Fate.ANSWERED and name in (None, of)
        )

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            if isinstance(self._behind, str):
                behind = await asyncio.open_unix_connection(self._behind)
            else:
                behind = await asyncio.open_connection(*self._behind)
            await _Link((reader, writer), behind, self).carry()

    def name_of(self, command: list[bytes]) -> str:
        word = command[0].decode().upper()
        if word == "EVALSHA":
            return self._scripts.get(command[1], word)
        if word == "EVAL":
            return self._scripts.get(sha1(command[1]).hexdigest().encode(), word)
        return word

    def fate_of(self, command: list[bytes]) -> Fate:
        name = self.name_of(command)
        fate = self.choose(name)
        self.counts[name, fate] += 1
        return fate

    @property
    def late_s(self) -> float:
        return self._late_s

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


class _Link:
    """Connection through the proxy."""

    def __init__(self, client, behind, proxy: SwallowingProxy) -> None:
        self._client, self._behind, self._proxy = client, behind, proxy
        self._swallows = False
        self._late_until_s = 0.0

    async def carry(self) -> None:
        ways = [asyncio.create_task(self._commands()), asyncio.create_task(self._answers())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for _, writer in (self._client, self._behind):
                writer.close()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _commands(self) -> None:
        parser, (reader, _), (_, writer) = hiredis.Reader(), self._client, self._behind
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                fate = self._proxy.fate_of(command)
                if fate is Fate.LOST:
                    return
                if fate is Fate.SWALLOWED:
                    self._swallows = True
                elif fate is Fate.LATE:
                    self._late_until_s = asyncio.get_running_loop().time() + self._proxy.late_s
                writer.write(hiredis.pack_command(tuple(command)))
            await writer.drain()

    async def _answers(self) -> None:
        (reader, _), (_, writer) = self._behind, self._client
        while data := await reader.read(1 << 16):
            if self._swallows:
                return
            await asyncio.sleep(max(0.0, self._late_until_s - asyncio.get_running_loop().time()))
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def swallowing(url: str, choose: Choose = answered, late_s: float = 1.5) -> AsyncIterator[SwallowingProxy]:
    proxy = SwallowingProxy(url, choose, late_s)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        proxy.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
    finally:
        server.close()
        await proxy.close()

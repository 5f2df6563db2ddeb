"""A TCP proxy on the test's event loop, which can be redirected or fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Proxy; new connections go to port `behind`."""

    def __init__(self, behind: int):
        self.behind = behind
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._silent: set[asyncio.StreamWriter] = set()

    def fall_silent(self) -> None:
        """Carry nothing more on open connections, which stay open; new ones work."""
        self._silent |= self._open

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self.behind)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pipe(reader, behind_writer), self._pipe(behind_reader, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    if writer not in self._silent:
                        writer.write(data)
                        await writer.drain()
        finally:
            self._open.discard(writer)
            writer.close()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def proxy_to(behind: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(behind)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            proxy.cut()

"""A TLS proxy in front of a unix socket or a port, on a thread of its own."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.certificates import Certificates


@contextmanager
def tls_in_front_of(behind: Path | int, made: Certificates) -> Iterator[int]:
    """Yield the port, on every address: no certificate names 127.0.0.2."""
    loop = asyncio.new_event_loop()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    open_pipes: set[asyncio.Task] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_pipes.add(asyncio.current_task())
        if isinstance(behind, int):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", behind)
        else:
            behind_reader, behind_writer = await asyncio.open_unix_connection(str(behind))
        await asyncio.gather(pipe(reader, behind_writer), pipe(behind_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(serve, "0.0.0.0", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def close() -> None:
        server.close()
        for task in open_pipes:
            task.cancel()
        await asyncio.gather(*open_pipes, return_exceptions=True)

    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

"""A harmless Redis command, and ports that are no Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.queue.redis.link import RedisLink


async def ping(link: RedisLink) -> None:
    """Raises QueueUnavailable."""
    async with link.commands() as redis:
        await redis.ping()


@asynccontextmanager
async def pretender(answer: bytes) -> AsyncIterator[int]:
    """Open a port that answers everything with the same bytes, or with none."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1 << 16):
                writer.write(answer)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]

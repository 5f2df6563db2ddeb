"""Server-sent events: frames, keep-alive comments, and slow clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import cast

from aiohttp import web
from aiohttp.http import StreamWriter

from service.gateway.http.connection import Protocol
from service.gateway.http.slow_clients import abort_connection
from service.gateway.openai.response_builder import Json, encode_json

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


COMMENT = b": keep-alive\n\n"


class ClientGone(ConnectionError):
    """The client left, or was cut off because it did not read."""


class SseStream:
    """A response of events. It starts with the first event: an earlier failure has its own HTTP status."""

    def __init__(
        self,
        http: web.Request,
        *,
        headers: Mapping[str, str],
        write_timeout_s: float,
        keep_alive_s: float,
        after: int = 0,
    ) -> None:
        """Skip the events up to number `after`, which the client has."""
        self._http = http
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._loop = asyncio.get_running_loop()
        self._written_at_s = self._loop.time()
        self._writer: StreamWriter | None = None  # None until started
        self._waiting = asyncio.Lock()  # held while waiting for the client to read
        self._number = 0
        self._after = after
        self.is_done = False

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def started(self) -> bool:
        return self._response.prepared

    async def send(self, data: Json, kind: str | None = None) -> None:
        """Send an event with its number and, if given, its kind. Raises ClientGone."""
        self._number += 1
        if self._number > self._after:
            name = b"" if kind is None else b"event: %b\n" % kind.encode()
            await self._write(b"%bid: %d\ndata: %b\n\n" % (name, self._number, encode_json(data)))

    async def send_unnumbered(self, data: Json, kind: str | None = None) -> None:
        """Send an event after which no client resumes. Raises ClientGone."""
        name = b"" if kind is None else b"event: %b\n" % kind.encode()
        await self._write(b"%bdata: %b\n\n" % (name, encode_json(data)))

    async def done(self) -> None:
        """Send OpenAI's end mark of a complete answer. Raises ClientGone."""
        await self._write(b"data: [DONE]\n\n")
        self.is_done = True

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """While inside, send a comment after `keep_alive_s` of silence, or to probe the client."""
        task = asyncio.create_task(self._keep_alive())
        try:
            with cast(Protocol, self._http.protocol).filler(self._send_filler):
                yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._written_at_s + self._keep_alive_s - self._loop.time())
            if self._loop.time() - self._written_at_s >= self._keep_alive_s:
                await self._write(COMMENT)

    async def _send_filler(self) -> None:
        with suppress(ClientGone):  # the next event reports it
            await self._write(COMMENT)

    async def _write(self, frame: bytes) -> None:
        self._written_at_s = self._loop.time()
        try:
            if self._writer is None or self._waiting.locked():
                async with asyncio.timeout(self._write_timeout_s), self._waiting:
                    self._writer = cast(StreamWriter, await self._response.prepare(self._http))
                    await self._writer.write(frame)
                return
            # Nearly always the kernel takes it at once: then neither clock nor lock is needed.
            await self._writer.write(frame, drain=False)
            if self._http.protocol.writing_paused:
                async with asyncio.timeout(self._write_timeout_s), self._waiting:
                    await self._writer.drain()
        except TimeoutError:
            abort_connection(self._http.transport)
            raise ClientGone("the client left its stream unread") from None
        except ConnectionError as error:
            raise ClientGone("the client left") from error

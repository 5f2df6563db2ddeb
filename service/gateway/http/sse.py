"""Server-sent events: frames, keep-alive comments, slow clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import cast

from aiohttp import web
from aiohttp.http import StreamWriter

from service.gateway.http.connection import Protocol
from service.gateway.http.slow_clients import abort_connection
from service.gateway.openai.json_objects import Json, encode_json

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


COMMENT = b": keep-alive\n\n"
MAX_WRITE_BYTES = 16 << 10
"""Frames are joined up to this size, to bound the memory of an unread stream."""


class ClientGone(ConnectionError):
    """The client left, or was disconnected because it did not read."""


class SseStream:
    """An SSE response. It starts with the first event, so that an earlier error has its own HTTP status."""

    def __init__(
        self,
        http: web.Request,
        *,
        headers: Mapping[str, str],
        write_timeout_s: float,
        keep_alive_s: float,
        after: int = 0,
    ) -> None:
        """Skip events up to number `after`, which the client already has."""
        self._http = http
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._loop = asyncio.get_running_loop()
        self._written_at_s = self._loop.time()
        self._writer: StreamWriter | None = None  # None until started
        self._waiting = asyncio.Lock()  # held while waiting for the client to read
        self._unwritten = bytearray()  # joined frames
        self._number = 0
        self._after = after
        self.is_done = False

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def started(self) -> bool:
        return self._response.prepared

    async def send(self, events: Iterable[Json], *, more: bool = False) -> None:
        """Write numbered events at once; with `more`, together with the next call's.

        An event's `type`, if any, becomes its name. Raises ClientGone.
        """
        await self._send(self._numbered(events), more=more)

    async def send_unnumbered(self, events: Iterable[Json], *, more: bool = False) -> None:
        """Like `send`, for events that clients cannot resume after."""
        await self._send((b"%bdata: %b\n\n" % (_name(event), encode_json(event)) for event in events), more=more)

    async def done(self) -> None:
        """Send `[DONE]`, OpenAI's mark of a complete response. Raises ClientGone."""
        await self._send((b"data: [DONE]\n\n",))
        self.is_done = True

    def _numbered(self, events: Iterable[Json]) -> Iterator[bytes]:
        for event in events:
            self._number += 1
            if self._number > self._after:
                yield b"%bid: %d\ndata: %b\n\n" % (_name(event), self._number, encode_json(event))

    async def _send(self, frames: Iterable[bytes], *, more: bool = False) -> None:
        # A single write: it costs more than making a frame.
        for frame in frames:
            self._unwritten += frame
            if len(self._unwritten) >= MAX_WRITE_BYTES:
                await self._flush()
        if not more:
            await self._flush()

    async def _flush(self) -> None:
        if self._unwritten:
            frames, self._unwritten = self._unwritten, bytearray()
            await self._write(frames)

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Within the context, send a comment after `keep_alive_s` of silence, or to probe the client."""
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

    async def _write(self, frames: bytes | bytearray) -> None:
        self._written_at_s = self._loop.time()
        try:
            if self._writer is None or self._waiting.locked():
                async with asyncio.timeout(self._write_timeout_s), self._waiting:
                    self._writer = cast(StreamWriter, await self._response.prepare(self._http))
                    await self._writer.write(frames)
                return
            # Fast path without timeout and lock: the kernel nearly always takes the frames at once.
            await self._writer.write(frames, drain=False)
            if self._http.protocol.writing_paused:
                async with asyncio.timeout(self._write_timeout_s), self._waiting:
                    await self._writer.drain()
        except TimeoutError:
            abort_connection(self._http.transport)
            raise ClientGone("the client left its stream unread") from None
        except ConnectionError as error:
            raise ClientGone("the client left") from error


def _name(event: Json) -> bytes:
    return b"event: %b\n" % event["type"].encode() if "type" in event else b""

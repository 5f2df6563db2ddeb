"""Server-sent events: frames, keep-alive, and the end of clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from service.gateway.http.unread import cut_off
from service.gateway.openai.answers import Json, encode_json

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


COMMENT = b": keep-alive\n\n"


class ClientGone(ConnectionError):
    """The client left, or left its stream unread for too long and was cut off."""


class SseStream:
    """One response of events. It starts with the first event, so that what fails before keeps its own HTTP status."""

    def __init__(
        self,
        http: web.Request,
        *,
        headers: Mapping[str, str],
        write_timeout_s: float,
        keep_alive_s: float,
        after: int = 0,
    ) -> None:
        """Events up to number `after` are known to the client and left out."""
        self._http = http
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._loop = asyncio.get_running_loop()
        self._written_at_s = self._loop.time()
        self._writer: AbstractStreamWriter | None = None  # None: not started
        self._waiting = asyncio.Lock()  # held by who waits for the client to read
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
        """The next event, under its number and, where it has one, the name of its kind. Raises ClientGone."""
        self._number += 1
        if self._number > self._after:
            name = b"" if kind is None else b"event: %b\n" % kind.encode()
            await self._write(b"%bid: %d\ndata: %b\n\n" % (name, self._number, encode_json(data)))

    async def send_unnumbered(self, data: Json) -> None:
        """An event that nobody can resume behind: an error, or one whose place among the others is chance. Raises
        ClientGone."""
        await self._write(b"data: %b\n\n" % encode_json(data))

    async def done(self) -> None:
        """OpenAI's mark behind an answer that is complete. Raises ClientGone."""
        await self._write(b"data: [DONE]\n\n")
        self.is_done = True

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """While inside, a comment is written whenever the stream was silent for `keep_alive_s`, and where one is needed
        to find out whether the client is still there."""
        task = asyncio.create_task(self._keep_alive())
        self._http.protocol.say_nothing = self._say_nothing
        try:
            yield
        finally:
            self._http.protocol.say_nothing = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._written_at_s + self._keep_alive_s - self._loop.time())
            if self._loop.time() - self._written_at_s >= self._keep_alive_s:
                await self._write(COMMENT)

    async def _say_nothing(self) -> None:
        with suppress(ClientGone):  # who writes the next event hears of it
            await self._write(COMMENT)

    async def _write(self, frame: bytes) -> None:
        self._written_at_s = self._loop.time()
        try:
            if self._writer is None or self._waiting.locked():
                async with asyncio.timeout(self._write_timeout_s), self._waiting:
                    self._writer = await self._response.prepare(self._http)
                    await self._writer.write(frame)
                return
            # Nearly always the kernel takes it at once: then neither clock nor lock is needed.
            await self._writer.write(frame, drain=False)
            if self._http.protocol.writing_paused:
                async with asyncio.timeout(self._write_timeout_s), self._waiting:
                    await self._writer.drain()
        except TimeoutError:
            cut_off(self._http.transport)
            raise ClientGone("the client left its stream unread") from None
        except ConnectionError as error:
            raise ClientGone("the client left") from error

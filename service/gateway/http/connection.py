"""One HTTP connection: how many there may be, how much is buffered, and how malformed HTTP is refused."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong

from service.errors import RequestError
from service.gateway.core.service import incident
from service.gateway.http.middleware import error_response
from service.gateway.http.unread import bound_unread
from service.gateway.openai.answers import encode_json, error_json
from service.observability.logs import fields

log = logging.getLogger("quire.gateway")

MAX_URL_BYTES = 8190
MAX_HEADER_BYTES = 8192
"""Of one header, name and value. Not what a URL may have, so that aiohttp's refusal tells which it was."""
MAX_HEADERS = 100
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What may be sent before an answer, as often as one likes, and means nothing: clients of HTTP/1.1 read past it."""
TAKE_UP_S, FIRST_PROBE_S, MAX_PROBE_S = 0.01, 0.05, 1.0
TCP_CLOSE = 7  # a socket that was reset, as Linux counts its states in TCP_INFO
LINGER_S = 1.0
MAX_LINGERING = 256
RESERVED_FILES = 64
"""Descriptors that connections leave to Redis, logs and the model's files."""


class Connections:
    """Counts the open connections, in all and by address."""

    def __init__(self, max_open: int, max_per_client: int) -> None:
        self._max_open = min(max_open, max(1, raise_file_limit() - RESERVED_FILES))
        if self._max_open < max_open:
            log.warning("fewer connections than --max-connections %s", fields(max_open_files=self._max_open))
        self._max_per_client = max_per_client
        self._by_client: Counter[str] = Counter()
        self._num_open = 0
        self._lingering: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def enter(self, client: str) -> RequestError | None:
        """Counts one more, or says why not."""
        if self._num_open >= self._max_open:
            message = "The server has no connection left."
            return RequestError(503, message, "server_error", code="too_many_connections", retry_after_s=2)
        if self._by_client[client] >= self._max_per_client:
            message = "Too many connections from this address."
            return RequestError(429, message, "rate_limit_error", code="too_many_connections", retry_after_s=2)
        self._num_open += 1
        self._by_client[client] += 1
        return None

    def leave(self, client: str) -> None:
        self._num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def linger(self, transport: asyncio.Transport) -> None:
        """Closes a connection that was turned away in a moment: closed at once with its request unread, the answer
        would be lost on the way."""
        if len(self._lingering) >= MAX_LINGERING:
            transport.close()
            return
        self._lingering[transport] = asyncio.get_running_loop().call_later(LINGER_S, self._end, transport)

    def close(self) -> None:
        """Ends those that linger; the others are the server's."""
        for transport, timer in list(self._lingering.items()):
            timer.cancel()
            self._end(transport)

    def _end(self, transport: asyncio.Transport) -> None:
        del self._lingering[transport]
        transport.close()


class Protocol(web.RequestHandler):
    """aiohttp's, but counted, with bounded buffers, and what it refuses by itself (malformed HTTP) worded like all
    else. A client that closes only its own side of the connection, behind its request, gets its answer."""

    __slots__ = ("_client", "_connections", "_is_counted", "_saying", "_write_timeout_s", "say_nothing")

    def __init__(self, manager: web.Server, connections: Connections, *, write_timeout_s: float, **how: Any) -> None:
        limits = {"max_line_size": MAX_URL_BYTES, "max_field_size": MAX_HEADER_BYTES, "max_headers": MAX_HEADERS}
        super().__init__(manager, **limits, **how)
        self._connections = connections
        self._write_timeout_s = write_timeout_s
        self._client = ""
        self._is_counted = False
        self._saying: asyncio.Task[None] | None = None
        self.say_nothing: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Of an answer that has begun, and that may hold what means nothing. Set by whoever writes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        bound_unread(transport, self._write_timeout_s)
        self._client = str((transport.get_extra_info("peername") or ("",))[0])
        refusal = self._connections.enter(self._client)
        if refusal is not None:
            self._turn_away(transport, refusal)
            return
        self._is_counted = True
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._is_counted:
            self._is_counted = False
            self._connections.leave(self._client)
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_counted:
            super().data_received(data)

    def eof_received(self) -> bool:
        """Whether the connection stays open for writing. The same FIN comes from a client that only has nothing more to
        say and from one that is gone, but the second resets a connection on which it is told anything."""
        is_idle = self._waiter is not None and not self._messages
        # A connection that was turned away, or is being closed, is not aiohttp's.
        if is_idle or self.transport is None or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if self._current_request is None:  # aiohttp is about to take it up
            self._loop.call_later(TAKE_UP_S, self._hear_end)
        else:
            self._hear_end()
        return True

    def _hear_end(self) -> None:
        if self.transport is None:
            return
        if self._can_probe():
            self.close()  # behind this answer
            self._probe(FIRST_PROBE_S)
        else:
            self.transport.close()

    def _can_probe(self) -> bool:
        """Whether the request is whole, and its client can be told what means nothing."""
        request = self._current_request
        if request is None or request.version < HttpVersion11 or not request.content.is_eof():
            return False
        return not request.writer.output_size or self.say_nothing is not None

    def _probe(self, again_in_s: float) -> None:
        """Says something that means nothing, looks at what became of it, and so on until the answer is over."""
        transport, request = self.transport, self._current_request
        if transport is None or transport.is_closing() or request is None:
            return
        tcp = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if tcp[0] == TCP_CLOSE:
            transport.abort()
            return
        if not request.writer.output_size:
            transport.write(INTERIM)
        elif self.say_nothing is not None:
            self._saying = self._loop.create_task(self.say_nothing())
        self._loop.call_later(again_in_s, self._probe, min(2 * again_in_s, MAX_PROBE_S))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a response is under way, no other can be sent")
        error = _refusal(exc) if status == 400 else incident(exc or RuntimeError(f"aiohttp refuses: {status}"), "http")
        response = error_response(error)
        response.force_close()
        return response

    def _turn_away(self, transport: asyncio.Transport, refusal: RequestError) -> None:
        body = encode_json(error_json(refusal))
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {refusal.retry_after_s}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        self._connections.linger(transport)


def raise_file_limit() -> int:
    """Each connection is a file: take as many as this process may have. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def _refusal(exc: BaseException | None) -> RequestError:
    if isinstance(exc, LineTooLong) and exc.args[1] == MAX_URL_BYTES:
        return RequestError(414, "The URL is too long.", code="url_too_long")
    if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
        return RequestError(431, "A header is too long, or there are too many.", code="headers_too_large")
    return RequestError(400, "The request is not well-formed HTTP.", code="bad_request")

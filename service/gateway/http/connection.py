"""HTTP connections: limits on their number, buffers and headers; refusals of malformed HTTP."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong

from service.errors import RequestError
from service.gateway.core.refusals import incident
from service.gateway.http.middleware import error_response
from service.gateway.http.slow_clients import bound_send_buffer
from service.gateway.openai.json_objects import encode_json, error_json
from service.observability.logs import fields

log = logging.getLogger("quire.gateway")

MAX_URL_BYTES = 8190
MAX_HEADER_BYTES = 8192
"""Limit on a header's name and value. Differs from MAX_URL_BYTES: aiohttp's error shows which limit was exceeded."""
MAX_HEADERS = 100
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""May be repeated: HTTP/1.1 clients skip it."""
PARSE_DELAY_S, FIRST_PROBE_S, MAX_PROBE_S = 0.01, 0.05, 1.0
TCP_CLOSE = 7  # state of a reset socket in Linux's TCP_INFO
LINGER_S = 1.0
MAX_LINGERING = 256
RESERVED_FILES = 64
"""File descriptors left for Redis, logs and the model's files."""


class Connections:
    def __init__(self, max_open: int, max_per_client: int) -> None:
        self._max_open = min(max_open, max(1, raise_file_limit() - RESERVED_FILES))
        if self._max_open < max_open:
            log.warning("fewer connections than --max-connections %s", fields(max_open_files=self._max_open))
        self._max_per_client = max_per_client
        self._by_client: Counter[str] = Counter()
        self._num_open = 0
        self._lingering: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def admit(self, client: str) -> RequestError | None:
        """Count a connection, or return its refusal."""
        if self._num_open >= self._max_open:
            message = "The server has no connection left."
            return RequestError(503, message, "server_error", code="too_many_connections", retry_after_s=2)
        if self._by_client[client] >= self._max_per_client:
            message = "Too many connections from this address."
            return RequestError(429, message, "rate_limit_error", code="too_many_connections", retry_after_s=2)
        self._num_open += 1
        self._by_client[client] += 1
        return None

    def release(self, client: str) -> None:
        self._num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def close_later(self, transport: asyncio.Transport) -> None:
        """Close after LINGER_S: an immediate close with unread input would discard the response."""
        if len(self._lingering) >= MAX_LINGERING:
            transport.close()
            return
        self._lingering[transport] = asyncio.get_running_loop().call_later(LINGER_S, self._close_lingering, transport)

    def close(self) -> None:
        for transport, timer in list(self._lingering.items()):
            timer.cancel()
            self._close_lingering(transport)

    def _close_lingering(self, transport: asyncio.Transport) -> None:
        del self._lingering[transport]
        transport.close()


class Protocol(web.RequestHandler):
    """aiohttp's protocol with counted connections, bounded buffers and OpenAI's errors.

    A client that half-closes its connection after sending a request still gets its response.
    """

    __slots__ = ("_client", "_connections", "_filler_task", "_is_counted", "_send_filler", "_write_timeout_s")

    def __init__(
        self, manager: web.Server, connections: Connections, *, write_timeout_s: float, **options: Any
    ) -> None:
        limits: dict[str, Any] = {
            "max_line_size": MAX_URL_BYTES,
            "max_field_size": MAX_HEADER_BYTES,
            "max_headers": MAX_HEADERS,
        }
        super().__init__(manager, **limits, **options)
        self._connections = connections
        self._write_timeout_s = write_timeout_s
        self._client = ""
        self._is_counted = False
        self._filler_task: asyncio.Task[None] | None = None
        self._send_filler: Callable[[], Coroutine[Any, Any, None]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        bound_send_buffer(transport, self._write_timeout_s)
        self._client = str((transport.get_extra_info("peername") or ("",))[0])
        refusal = self._connections.admit(self._client)
        if refusal is not None:
            self._refuse_connection(cast(asyncio.Transport, transport), refusal)
            return
        self._is_counted = True
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._is_counted:
            self._is_counted = False
            self._connections.release(self._client)
            super().connection_lost(exc)

    @contextmanager
    def filler(self, send_filler: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
        """Within the context, `send_filler` may send meaningless bytes in the begun response."""
        self._send_filler = send_filler
        try:
            yield
        finally:
            self._send_filler = None

    def data_received(self, data: bytes) -> None:
        if self._is_counted:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads it; aiohttp declares None
        """Return whether the connection stays open for writing; a client that has fully closed it resets it then."""
        is_idle = self._waiter is not None and not self._messages
        # aiohttp does not own a refused or closing connection.
        if is_idle or self.transport is None or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if self._current_request is None:  # aiohttp is about to read it
            self._loop.call_later(PARSE_DELAY_S, self._on_client_eof)
        else:
            self._on_client_eof()
        return True

    def _on_client_eof(self) -> None:
        if self.transport is None:
            return
        if self._can_probe():
            self.close()  # after this response
            self._probe(FIRST_PROBE_S)
        else:
            self.transport.close()

    def _can_probe(self) -> bool:
        """Return whether the request is complete and fillers can be sent to its client."""
        request = self._current_request
        if request is None or request.version < HttpVersion11 or not request.content.is_eof():
            return False
        return not request.writer.output_size or self._send_filler is not None

    def _probe(self, again_in_s: float) -> None:
        """Send fillers and check for a reset, until the response ends."""
        transport, request = self.transport, self._current_request
        if transport is None or transport.is_closing() or request is None:
            return
        tcp = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if tcp[0] == TCP_CLOSE:
            transport.abort()
            return
        if not request.writer.output_size:
            transport.write(INTERIM)
        elif self._send_filler is not None:
            self._filler_task = self._loop.create_task(self._send_filler())
        self._loop.call_later(again_in_s, self._probe, min(2 * again_in_s, MAX_PROBE_S))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a response has already begun")
        error = _refusal(exc) if status == 400 else incident(exc or RuntimeError(f"aiohttp refuses: {status}"), "http")
        response = error_response(error)
        response.force_close()
        return response

    def _refuse_connection(self, transport: asyncio.Transport, refusal: RequestError) -> None:
        body = encode_json(error_json(refusal))
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {refusal.retry_after_s}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        self._connections.close_later(transport)


def raise_file_limit() -> int:
    """Raise the limit on open files (connections need one each) to its maximum; return it."""
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

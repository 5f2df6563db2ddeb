"""Liveness and readiness, also on `--probe-port`, from a thread that responds while the event loop is busy.

The thread's `/livez` returns 503 once the loop has been stuck for DEAD_AFTER_S.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from service.errors import StartupError
from service.gateway.core.service import InferenceService
from service.gateway.openai.json_objects import encode_json
from service.observability.logs import fields
from service.queue.interface import QueueUnavailable

log = logging.getLogger("quire.gateway")

TICK_S = 0.5
STALE_AFTER_S = 3.0
"""Maximum age of the event loop's last readiness report."""
DEAD_AFTER_S = 60.0
TEXT_WITHIN_S = 1.0
"""Time within which a text thread must pick up a call."""
MAX_REQUEST_BYTES = 4096
MAX_CLIENTS = 64
CLIENT_TIMEOUT_S = 2.0

Answer = tuple[int, dict[str, Any]]


async def readiness(service: InferenceService) -> Answer:
    """Return status and body: 200 if a request would run now, else 503 with what is missing."""
    missing = ["this gateway is shutting down"] if service.admission.draining else []
    num_ready = 0
    try:
        num_ready = (await service.fleet.view()).num_ready
        if not num_ready:
            missing.append("no ready worker serves this model")
    except QueueUnavailable:
        missing.append("the queue is not available")
    missing += await service.text_faults(TEXT_WITHIN_S)
    body = {"status": "not ready" if missing else "ok", "missing": missing, "num_ready_workers": num_ready}
    return (503 if missing else 200), body


class LoopReport:
    """The event loop's last report, read by another thread."""

    def __init__(self) -> None:
        self._turned_at_s = self._reported_at_s = time.monotonic()
        self._ready: Answer = (503, {"status": "not ready", "missing": ["it has just started"], "num_ready_workers": 0})

    async def keep_turning(self) -> None:
        while True:
            self._turned_at_s = time.monotonic()
            await asyncio.sleep(TICK_S)

    async def keep_reporting(self, service: InferenceService) -> None:
        while True:
            self._ready = await readiness(service)
            self._reported_at_s = time.monotonic()
            await asyncio.sleep(TICK_S)

    def live(self) -> Answer:
        silent_s = round(time.monotonic() - self._turned_at_s, 3)
        is_dead = silent_s > DEAD_AFTER_S
        return (503 if is_dead else 200), {"status": "dead" if is_dead else "ok", "loop_silent_s": silent_s}

    def ready(self) -> Answer:
        if time.monotonic() - self._reported_at_s < STALE_AFTER_S:
            return self._ready
        return 503, {"status": "not ready", "missing": ["this gateway is busy"], "num_ready_workers": 0}


@asynccontextmanager
async def probed(service: InferenceService, host: str, port: int | None) -> AsyncIterator[int | None]:
    """Serve probes on `port`, if given, from a thread; yield the bound port. Raises StartupError."""
    if port is None:
        yield None
        return
    report = LoopReport()
    try:
        server = ProbeServer(report, host, port)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port} (--probe-port): {error.strerror or error}") from error
    reporting = [asyncio.create_task(duty) for duty in (report.keep_turning(), report.keep_reporting(service))]
    server.start()
    log.info("probes ready %s", fields(port=server.port))
    try:
        yield server.port
    finally:
        server.stop()
        for duty in reporting:
            duty.cancel()
        await asyncio.gather(*reporting, return_exceptions=True)


class ProbeServer:
    """Serves short connections, closed after each response, on one non-blocking thread."""

    def __init__(self, report: LoopReport, host: str, port: int) -> None:
        """Listen. Raises OSError."""
        self._routes = {b"/livez": report.live, b"/readyz": report.ready, b"/health": report.ready}
        self._selector = selectors.DefaultSelector()
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address, family=family, backlog=MAX_CLIENTS)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._clients: dict[socket.socket, tuple[float, bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._wake.send(b"x")
        self._thread.join()
        for sock in (self._listener, self._wake, self._woken, *self._clients):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(CLIENT_TIMEOUT_S if self._clients else None)]
            if self._woken in ready:
                return
            if self._listener in ready:
                self._accept()
            for client in [client for client in self._clients if client in ready]:
                self._read(client)
            now_s = time.monotonic()
            for sock in [sock for sock, (since_s, _) in self._clients.items() if now_s - since_s > CLIENT_TIMEOUT_S]:
                self._drop(sock)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:  # the client left, or no file descriptor is free
            log.debug("no probe taken: %s", error)
            return
        client.setblocking(False)
        if len(self._clients) >= MAX_CLIENTS:
            self._drop(min(self._clients, key=lambda sock: self._clients[sock][0]))
        self._clients[client] = (time.monotonic(), b"")
        self._selector.register(client, selectors.EVENT_READ)

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(MAX_REQUEST_BYTES)
            since_s, before = self._clients[client]
            request = before + data
            if data and b"\r\n\r\n" not in request and len(request) < MAX_REQUEST_BYTES:
                self._clients[client] = (since_s, request)
                return
            if data:
                client.send(self._answer(request))  # a few hundred bytes, which fit into the socket buffer
        except OSError as error:
            log.debug("a probe left: %s", error)
        self._drop(client)

    def _answer(self, request: bytes) -> bytes:
        words = request.partition(b"\r\n")[0].split(b" ")
        route = self._routes.get(words[1].partition(b"?")[0]) if len(words) == 3 else None
        if route is None or words[0] not in (b"GET", b"HEAD"):
            status, body = 404, b""
        else:
            status, report = route()
            body = encode_json(report)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if words[0] == b"HEAD" else body)

    def _drop(self, client: socket.socket) -> None:
        if self._clients.pop(client, None) is not None:
            self._selector.unregister(client)
            client.close()

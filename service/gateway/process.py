"""The gateway process: serves HTTP and the ingress until stopped, then drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, web

from service.config.settings import Settings
from service.errors import StartupError
from service.garbage import freeze_heap
from service.gateway.app import make_app
from service.gateway.batches.runner import BatchRunner
from service.gateway.core.served_model import ServedModel
from service.gateway.core.service import InferenceService
from service.gateway.endpoints import read_outline
from service.gateway.http.connection import Connections, Protocol
from service.gateway.http.middleware import with_openai_errors
from service.gateway.http.root_path import without_prefix
from service.gateway.http.tls import open_tls
from service.gateway.ingress.ingress import QueueIngress
from service.gateway.routes.probes import probed
from service.observability.gateway_group import GatewayGroup
from service.observability.logs import fields
from service.observability.tracing import NO_TRACING, Tracing
from service.queue.interface import GatewayQueue
from service.shutdown import Shutdown

log = logging.getLogger("quire.gateway")

SHUTDOWN_TIMEOUT_S = 2.0
"""Time to finish writing responses after their requests ended."""
BACKLOG = 1024
HANDSHAKE_S = 10.0


async def run_gateway(
    settings: Settings,
    queue: GatewayQueue,
    stop: Shutdown,
    *,
    on_ready: Callable[[str], None],
    tracing: Tracing = NO_TRACING,
    group: GatewayGroup | None = None,
) -> None:
    """Serve until `stop` is set or the task is cancelled, then drain.

    `on_ready` receives the URL; `group` shares the port. The caller closes `queue`. Raises StartupError if the model
    cannot be read or the port is taken.
    """
    # Python would print and remember every new form of malformed input.
    warnings.simplefilter("ignore", BadContentDispositionHeader)
    warnings.simplefilter("ignore", BadContentDispositionParam)
    model = await asyncio.to_thread(ServedModel.read, settings)
    freeze_heap()
    async with serving(settings, model, queue, tracing, group, stop) as url:
        on_ready(url)
        await stop.wait()


@contextlib.asynccontextmanager
async def serving(
    settings: Settings,
    model: ServedModel,
    queue: GatewayQueue,
    tracing: Tracing = NO_TRACING,
    group: GatewayGroup | None = None,
    stop: Shutdown | None = None,
) -> AsyncIterator[str]:
    """Open HTTP and the ingress, yield the URL, and drain on exit until `stop.at_once`. Raises StartupError."""
    service = InferenceService(settings, model, queue, read_outline, tracing, group)
    connections = Connections(settings.max_connections, settings.max_connections_per_client)
    queue_ingress = QueueIngress(service)
    batch_runner = BatchRunner(service)
    runner = await _set_up(make_app(service, batch_runner), settings)
    queue_task = batch_task = None
    try:
        async with (
            open_tls(settings.ssl_certfile, settings.ssl_keyfile) as tls,
            probed(service, settings.host, settings.probe_port),
        ):
            await service.grammars.wait_until_ready()
            server = await _listen(runner, settings, connections, tls, reuse_port=group is not None)
            queue_task = asyncio.create_task(queue_ingress.run())
            batch_task = asyncio.create_task(batch_runner.run())
            url = _url("http" if tls is None else "https", settings.host, server.sockets[0].getsockname()[1])
            log.info("gateway ready %s", fields(url=url, model=model.name))
            try:
                yield url
            finally:
                log.info("gateway drains %s", fields(num_open=service.dispatcher.num_open))
                server.close()
                queue_ingress.stop()
                batch_task.cancel()
                await service.drain(asyncio.Event() if stop is None else stop.at_once)
    finally:
        if batch_task is not None:
            await asyncio.wait({batch_task}, timeout=SHUTDOWN_TIMEOUT_S)
        await runner.cleanup()
        connections.close()
        if queue_task is not None:
            await asyncio.wait({queue_task}, timeout=SHUTDOWN_TIMEOUT_S)
            queue_task.cancel()
        await service.close()


async def _set_up(app: web.Application, settings: Settings) -> web.AppRunner:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    server = _server_of(runner)
    server.request_handler = with_openai_errors(server.request_handler, settings.write_timeout)
    server.request_factory = without_prefix(server.request_factory, settings.root_path or "")
    return runner


async def _listen(
    runner: web.AppRunner,
    settings: Settings,
    connections: Connections,
    tls: ssl.SSLContext | None,
    *,
    reuse_port: bool,
) -> asyncio.Server:
    """Create a server with our Protocol, which aiohttp's sites cannot do."""
    loop = asyncio.get_running_loop()

    def protocol() -> Protocol:
        # Encoded bodies are refused, so there is nothing to decompress. A connection counts as idle until its headers
        # are complete, so `keepalive_timeout` is also their deadline.
        return Protocol(
            _server_of(runner),
            connections,
            write_timeout_s=settings.write_timeout,
            loop=loop,
            keepalive_timeout=settings.read_timeout,
            auto_decompress=False,
            access_log=None,
        )

    options: dict[str, Any] = (
        {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": min(settings.read_timeout, HANDSHAKE_S)}
    )
    if reuse_port:
        options["reuse_port"] = True
    try:
        server: asyncio.Server = await loop.create_server(
            protocol, settings.host, settings.port, backlog=BACKLOG, **options
        )
        return server
    except OSError as error:
        # asyncio's message repeats the address.
        reason = error.strerror if isinstance(error, socket.gaierror) or not error.errno else os.strerror(error.errno)
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from error


def _server_of(runner: web.AppRunner) -> web.Server:
    if runner.server is None:
        raise RuntimeError("the runner was not set up")
    return runner.server


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

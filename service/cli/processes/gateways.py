"""The gateways on a port: one, or a group that shares it by SO_REUSEPORT.

The kernel spreads connections by hash: of 256 over four gateways, each got 59 to 72. With an inherited socket it wakes
the last waiter first: 2 to 195.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any

from service.cli.processes.children import ChildGroup, RestartingChild
from service.config.settings import GATEWAY, Settings
from service.errors import StartupError
from service.observability.gateway_group import VARIABLE, GatewayGroup, forget_open_requests
from service.observability.logs import PROCESS_NAME

MAX_PORT = 65535
SHARED_BYTES = 2 << 20
"""Size of the files that a gateway shares (open requests, metrics): 1.1 MB, more after restarts."""

_Address = tuple[Any, ...]


@contextmanager
def open_gateways(settings: Settings) -> Iterator[ChildGroup]:
    """Yield the gateways, not yet started. A single gateway is not restarted. Raises StartupError."""
    num = settings.api_server_count
    if num == 1:
        yield ChildGroup([RestartingChild(GATEWAY, settings, restarts_s=())])
        return
    with reserved_port(settings.host, settings.port) as port, _shared_folder(num) as folder:
        groups = [GatewayGroup(folder, index, num) for index in range(num)]
        yield ChildGroup([_member(replace(settings, port=port), group) for group in groups])


@contextmanager
def _shared_folder(num_gateways: int) -> Iterator[Path]:
    """Yield the folder of the files that gateways map. Raises StartupError.

    On a full disk, writing to a mapped file would kill the process.
    """
    try:
        folder = TemporaryDirectory(prefix="quire-", ignore_cleanup_errors=True)
    except OSError as error:
        raise StartupError(f"--api-server-count: the gateways share files in TMPDIR: {error.strerror}") from None
    with folder as path:
        needed, free = num_gateways * SHARED_BYTES, disk_usage(path).free
        if free < needed:
            raise StartupError(
                f"--api-server-count: {num_gateways} gateways need {needed >> 20} MiB in {Path(path).parent} (TMPDIR), "
                f"{free >> 20} are free"
            )
        yield Path(path)


def require_ports(settings: Settings) -> None:
    """Raises StartupError if the gateways could not listen."""
    if settings.api_server_count > 1:
        share_of(settings, GatewayGroup(Path(), 0, settings.api_server_count))
    with reserved_port(settings.host, settings.port):
        pass


def _member(settings: Settings, group: GatewayGroup) -> RestartingChild:
    async def on_end(pid: int) -> None:
        forget_open_requests(group)
        for path in group.folder.glob(f"gauge_live*_{pid}.db"):  # files of prometheus_client
            path.unlink()

    environ = {
        VARIABLE: group.to_variable(),
        "PROMETHEUS_MULTIPROC_DIR": str(group.folder),
        PROCESS_NAME: f"{GATEWAY}-{group.index}",
    }
    return RestartingChild(GATEWAY, share_of(settings, group), environ, on_end=on_end)


def share_of(settings: Settings, group: GatewayGroup) -> Settings:
    """Return settings with per-gateway shares of the limits. Raises StartupError."""

    def part(whole: int) -> int:
        return -(-whole // group.size)

    probe_port = settings.probe_port
    if probe_port:
        ports = range(probe_port, probe_port + group.size)
        if ports[-1] > MAX_PORT or settings.port in ports:
            raise StartupError(
                f"--probe-port: {probe_port}: gateways take {ports[0]} to {ports[-1]} "
                f"(up to {MAX_PORT}, without --port)"
            )
        probe_port = ports[group.index]
    return replace(
        settings,
        api_server_count=1,
        probe_port=probe_port,
        max_connections=part(settings.max_connections),
        max_connections_per_client=part(settings.max_connections_per_client),
        max_body_bytes_in_flight=max(part(settings.max_body_bytes_in_flight), 2 * settings.max_body_bytes),
    )


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Reserve a port, without listening, for processes that share it; yield its number.

    Raises StartupError if it is taken.
    """
    with ExitStack() as held:
        try:
            for family, address in _addresses(host, port):
                with _bound(family, (address[0], port, *address[2:]), shared=False) as alone:
                    port = alone.getsockname()[1]
                held.enter_context(_bound(family, (address[0], port, *address[2:]), shared=True))
        except OSError as error:
            reason = (
                error.strerror if isinstance(error, socket.gaierror) or not error.errno else os.strerror(error.errno)
            )
            raise StartupError(f"cannot listen on {host}:{port}: {reason}") from error
        yield port


def _addresses(host: str, port: int) -> list[tuple[int, _Address]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _bound(family: int, address: _Address, *, shared: bool) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened

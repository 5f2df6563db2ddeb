"""Limits on unread response bytes in the kernel, and on the time without progress."""

from __future__ import annotations

import asyncio
import socket
import struct

from aiohttp import web

SEND_BUFFER_BYTES = 128 << 10
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


def bound_send_buffer(transport: asyncio.BaseTransport, timeout_s: float) -> None:
    """Limit the kernel's send buffer and the time without progress, even after the connection is closed."""
    sock = transport.get_extra_info("socket")
    # The default of several megabytes would hide a client that does not read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


def abort_connection(transport: asyncio.Transport | None) -> None:
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


async def drain_writes(http: web.BaseRequest) -> None:
    """Wait until the kernel has all bytes: aiohttp treats bytes below the high-water mark as written."""
    transport = http.transport
    if transport is None or not transport.get_write_buffer_size():
        return
    transport.set_write_buffer_limits(high=0)
    try:
        await http.writer.drain()
    finally:
        if not transport.is_closing():
            transport.set_write_buffer_limits()

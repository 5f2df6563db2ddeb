"""Bounds on what a client leaves unread: what our side holds for it, and for how long."""

from __future__ import annotations

import asyncio
import socket
import struct

from aiohttp import web

SEND_BUFFER_BYTES = 128 << 10
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


def bound_unread(transport: asyncio.BaseTransport, timeout_s: float) -> None:
    """Have the kernel hold little for this connection, and end it once its client has taken nothing for `timeout_s`:
    one that we have closed too, which it would otherwise keep for minutes."""
    sock = transport.get_extra_info("socket")
    # The default of several megabytes would hide a client that does not read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


def cut_off(transport: asyncio.Transport | None) -> None:
    """End the connection at once, with all that its client has not read."""
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


async def flush(http: web.Request) -> None:
    """Wait until the kernel has taken all that was written: a transport that holds less than it is allowed to counts as
    written, and closed it would wait for its client for ever."""
    transport = http.transport
    if transport is None or not transport.get_write_buffer_size():
        return
    transport.set_write_buffer_limits(high=0)
    try:
        await http.writer.drain()
    finally:
        if not transport.is_closing():
            transport.set_write_buffer_limits()

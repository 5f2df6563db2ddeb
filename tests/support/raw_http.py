"""Raw HTTP, for bytes that no client library sends."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from urllib.parse import urlsplit


class RawClient:
    """One TCP connection to a server's URL; close or reset it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str, receive_bytes: int | None = None) -> RawClient:
        """`receive_bytes`: size of the kernel's receive buffer."""
        parts = urlsplit(url)
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 12))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def send_later(self, data: bytes) -> None:
        """Send in the background, as fast as the server reads."""
        self._writer.write(data)

    async def post(self, path: str, body: object) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await self.send(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers by lower-case name and body of a response with Content-Length, after interim ones."""
        interim = b"HTTP/1.1 100 "
        while (received := await self._reader.readuntil(b"\r\n\r\n")).startswith(interim):
            pass
        head = received.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def read_until(self, mark: bytes) -> bytes:
        return await self._reader.readuntil(mark)

    async def whole_response(self, has_body: bool = True) -> tuple[int, bytes]:
        """Return status and body, chunked or not, after interim ones; `has_body` False: the answer to a HEAD. Raises
        IncompleteReadError if the server closes early."""
        while (received := await self._reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 "):
            pass
        lines = received.decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        if not has_body:
            return int(lines[0].split()[1]), b""
        if "chunked" not in headers.get("transfer-encoding", ""):
            body = self._reader.readexactly(int(headers["content-length"])) if "content-length" in headers else None
            return int(lines[0].split()[1]), await (body or self._reader.read())
        chunks = []
        while chunk := await self.chunk():
            chunks.append(chunk)
        return int(lines[0].split()[1]), b"".join(chunks)

    async def chunk(self) -> bytes:
        """Return the next chunk; empty at the end."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2] if size else b""

    async def at_eof(self) -> bool:
        """Wait for the server to close."""
        try:
            return await self._reader.read() == b""
        except ConnectionError:
            return True

    def half_close(self) -> None:
        """Close the sending side only."""
        self._writer.write_eof()

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()

    async def close(self) -> None:
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def reset(self) -> None:
        """Send RST instead of FIN, like a killed client."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)


async def raw(gateway, request: bytes):
    """Send these bytes; return status and JSON of the answer."""
    client = await RawClient.connect(gateway.url)
    try:
        await client.send(request)
        status, headers, body = await client.response()
        return status, headers, json.loads(body)
    finally:
        await client.close()


def is_error(answer) -> bool:
    """Return whether it is OpenAI's error JSON."""
    error = answer["error"]
    return set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)

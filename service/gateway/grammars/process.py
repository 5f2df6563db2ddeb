"""The gateway's side of one grammar process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import msgspec

from service.gateway.grammars.messages import LENGTH, MAX_FRAME_BYTES, Reply, decode_reply, framed
from service.import_root import python_path

CHILD = f"{__package__}.child"
PASSED_ON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables to pass on; others may be secret."""


@dataclass(frozen=True)
class ProcessEnded(Exception):
    """The process has exited. `status` is Popen's returncode."""

    status: int

    @property
    def was_out_of_time(self) -> bool:
        return self.status == -signal.SIGPROF

    @property
    def was_out_of_memory(self) -> bool:
        """True on SIGABRT: Rust aborts when an allocation fails."""
        return self.status == -signal.SIGABRT


class GrammarProcess:
    def __init__(self) -> None:
        """Start the process. It ends with the calling thread: call this on the main thread. Raises OSError."""
        self._started_s = time.monotonic()
        ours, its = socket.socketpair()
        ours.setblocking(False)
        self._link = ours
        environ = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, str(its.fileno()), str(os.getpid())],
                env={**environ, "PYTHONPATH": python_path(environ)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        except OSError:
            ours.close()
            raise
        finally:
            its.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the process's CPU seconds, or its age without /proc."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8") as stat:
                words = stat.read().rpartition(")")[2].split()
        except OSError:
            return time.monotonic() - self._started_s
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    async def ask(self, frame: bytes) -> Reply:
        """Send a frame and return the reply. Cancelling kills the process. Raises ProcessEnded."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._link, framed(frame))
            (num_bytes,) = LENGTH.unpack(await self._receive(LENGTH.size))
            if num_bytes > MAX_FRAME_BYTES:
                raise ConnectionError("the frame is too long")
            return decode_reply(await self._receive(num_bytes))
        except (OSError, msgspec.DecodeError):
            raise ProcessEnded(await self.end()) from None
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> int:
        """Return the exit status; kill the process if it does not exit by itself."""
        self._link.close()  # a process that waits for a frame exits
        try:
            return await asyncio.to_thread(self._process.wait, 0.2)
        except subprocess.TimeoutExpired:
            self.kill()
            return await asyncio.to_thread(self._process.wait)

    async def _receive(self, num_bytes: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < num_bytes:
            more = await loop.sock_recv(self._link, min(num_bytes - len(data), 1 << 18))
            if not more:
                raise ConnectionError("the process closed the connection")
            data += more
        return bytes(data)

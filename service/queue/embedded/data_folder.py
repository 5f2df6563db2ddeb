from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from service.errors import StartupError
from service.observability.logs import fields

log = logging.getLogger("quire.redis")

LOCK_WAIT_S = 3.0
MAX_NOTE_BYTES = 200

LOCK, LOG, WRITER, SOCKETS = "lock", "redis.log", "written-by", "socket"
DATA = ("appendonlydir", "appendonlydir/*", "*.aof", "*.rdb")


class DataFolder:
    """Data folder that only its owner can read."""

    def __init__(self, path: Path) -> None:
        """Create the folder if missing. Raises StartupError."""
        self.path = path.absolute()
        self.log_path = self.path / LOG
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_private()
        except OSError as error:
            raise StartupError(_reason(error, self.path)) from error

    def lock(self) -> int:
        """Return a lock that the server inherits: the folder is free once both have ended. Raises StartupError."""
        try:
            lock = self._open(LOCK, os.O_RDWR)
        except OSError as error:
            raise StartupError(_reason(error, self.path)) from error
        give_up = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > give_up:
                    os.close(lock)
                    problem = f"{self.path} is in use by another Quire; --data-dir names another folder"
                    raise StartupError(problem) from None
            time.sleep(0.05)

    def open_log(self) -> int:
        """Open the log for writing. Raises OSError."""
        return self._open(LOG, os.O_WRONLY | os.O_TRUNC)

    @property
    def has_data(self) -> bool:
        return any(True for pattern in DATA for _ in self.path.glob(pattern))

    def writer(self) -> str | None:
        """Return the last server's name and version, or None."""
        try:
            note = os.open(self.path / WRITER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(note, "rb") as file:
                text = file.read(MAX_NOTE_BYTES).decode("ascii", "replace").strip()
        except OSError:
            return None
        return text if re.fullmatch(r"[a-z]+ [0-9.]{1,40}", text) else None

    def note_writer(self, server: str) -> None:
        """Record the server's name and version. Raises StartupError."""
        if self.writer() == server:
            return
        try:
            with open(self._open(WRITER, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
                file.write(server + "\n")
        except OSError as error:
            raise StartupError(_reason(error, self.path)) from error

    def socket_folder(self) -> Path:
        """Return the socket's folder. Raises StartupError."""
        path = self.path / SOCKETS
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            _restrict(path)
        except OSError as error:
            raise StartupError(_reason(error, self.path)) from error
        return path

    def _open(self, name: str, flags: int) -> int:
        return os.open(self.path / name, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)

    def _make_private(self) -> None:
        num_open = sum(_restrict(path) for path in self._own_files())
        if num_open:
            log.warning("others could read files of --data-dir %s", fields(data=self.path, made_private=num_open))
        if os.stat(self.path).st_mode & stat.S_IWOTH:
            log.warning("others can write to --data-dir: chmod o-w %s", self.path)

    def _own_files(self) -> Iterator[Path]:
        for pattern in (LOCK, LOG, WRITER, SOCKETS, *DATA):
            yield from self.path.glob(pattern)


def _reason(error: OSError, folder: Path) -> str:
    return f"--data-dir: {error.filename or folder} cannot be written: {error.strerror}"


def _restrict(path: Path) -> bool:
    """Remove others' rights; return True if there were any. Raises StartupError for another user's file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:  # renamed meanwhile
        return False
    if os.geteuid() not in (0, found.st_uid):
        raise StartupError(f"--data-dir: {path} belongs to another user: end their Quire, or name another folder")
    if not found.st_mode & 0o077:
        return False
    os.chmod(path, stat.S_IMODE(found.st_mode) & 0o700)
    return True

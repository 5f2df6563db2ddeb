"""Notifications by systemd's sd_notify protocol; no-ops without a supervisor."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger("quire.supervisor")

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Variables that child processes must not inherit."""
FEEDS_PER_TIMEOUT = 4


class Supervisor:
    """Sends to $NOTIFY_SOCKET. Thread-safe."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._feed_every_s = _timeout_s(environ) / FEEDS_PER_TIMEOUT
        self._fed_at_s = float("-inf")

    @property
    def feed_every_s(self) -> float | None:
        """Seconds between watchdog notifications; None without a watchdog."""
        return self._feed_every_s or None

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=draining")

    def feed(self) -> None:
        """Report progress, at most every `feed_every_s`; cheap enough for every step."""
        if not self._feed_every_s:
            return
        now_s = time.monotonic()
        if now_s - self._fed_at_s >= self._feed_every_s:
            self._fed_at_s = now_s
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(1.0)
                sender.connect(self._address)
                sender.sendall(text.encode())
        except OSError as error:
            log.warning("supervisor not reachable: %s", error)


def _timeout_s(environ: Mapping[str, str]) -> float:
    """Return the watchdog's timeout, 0 if this process has none."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    text = environ.get("WATCHDOG_USEC", "")
    return int(text) / 1e6 if text.isdecimal() else 0.0

"""`quire gateway` and `quire worker` as processes under a supervisor with a notify socket."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from tests.support.served import REPOSITORY

WAIT_S = 60.0


class Part:
    """One running process. `received` counts the lines that its supervisor got.

    It prints to a file, so that a line printed before a notification is there once that has arrived.
    """

    def __init__(
        self,
        folder: Path,
        verb: str,
        *flags: str,
        command: tuple[str, ...] = ("-m", "service.cli.entry"),
        **environ: str,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.bind(str(folder / "notify"))
        self.received: Counter[str] = Counter()
        self._log = folder / "log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, verb, *flags],
                cwd=REPOSITORY,
                env={**inherited, "NOTIFY_SOCKET": str(folder / "notify"), **environ},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._hearing = threading.Thread(target=self._receive, daemon=True)
        self._hearing.start()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def until_received(self, line: str, num_times: int = 1, within_s: float = WAIT_S) -> None:
        """Wait until the supervisor has received `line` this many times."""
        give_up_s = time.monotonic() + within_s
        while self.received[line] < num_times:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < give_up_s, f"{line} was not printed {num_times} times:\n{self.output}"
            time.sleep(0.02)

    def found(self, pattern: str) -> str:
        """Return the pattern's group in the process's output."""
        match = re.search(pattern, self.output)
        assert match, self.output
        return match[1]

    def end(self, number: int = signal.SIGTERM, within_s: float = WAIT_S) -> int:
        """Send the signal; return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(within_s)

    def wait(self, within_s: float = WAIT_S) -> int:
        """Return the exit status, with all notifications received."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"it did not end:\n{self.output}") from None
        self._hear_out()
        return status

    def close(self) -> None:
        """End the process and its thread, in any state."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._hear_out()
        self._listener.close()

    def _hear_out(self) -> None:
        if self._hearing.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._hearing.join(WAIT_S)

    def _receive(self) -> None:
        while message := self._listener.recv(4096):
            self.received.update(message.decode().splitlines())

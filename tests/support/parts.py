"""`quire gateway` and `quire worker` as a supervisor runs them: a process each, with a socket to say how it is."""

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
    """One running part. `told` counts what its supervisor heard, line by line.

    What it prints goes to a file: a line printed before something was told is there once that was heard.
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
        """Waits until the supervisor has heard `line` so often."""
        give_up_s = time.monotonic() + within_s
        while self.received[line] < num_times:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < give_up_s, f"{line} was not said {num_times} times:\n{self.output}"
            time.sleep(0.02)

    def found(self, pattern: str) -> str:
        """The group of the pattern in what the process has printed."""
        match = re.search(pattern, self.output)
        assert match, self.output
        return match[1]

    def end(self, number: int = signal.SIGTERM, within_s: float = WAIT_S) -> int:
        """The exit status after this signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(within_s)

    def wait(self, within_s: float = WAIT_S) -> int:
        """The exit status; all it said is heard by then."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"it did not end:\n{self.output}") from None
        self._hear_out()
        return status

    def close(self) -> None:
        """Whatever state it is in, it and its thread are gone after this."""
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

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
    """One running part. `told` counts what its supervisor heard, line by line."""

    def __init__(
        self,
        folder: Path,
        verb: str,
        *flags: str,
        command: tuple[str, ...] = ("-m", "service.cli.main"),
        **environ: str,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.bind(str(folder / "notify"))
        self.told: Counter[str] = Counter()
        self.lines: list[str] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        self.process = subprocess.Popen(
            [sys.executable, *command, verb, *flags],
            cwd=REPOSITORY,
            env={**inherited, "NOTIFY_SOCKET": str(folder / "notify"), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._hear, self._collect)]
        for thread in self._threads:
            thread.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def until_told(self, line: str, num_times: int = 1, within_s: float = WAIT_S) -> None:
        """Waits until the supervisor has heard `line` so often."""
        give_up_s = time.monotonic() + within_s
        while self.told[line] < num_times:
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
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"it did not end:\n{self.output}") from None

    def close(self) -> None:
        """Whatever state it is in, it and its threads are gone after this."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listener.close()
        self.process.stdout.close()

    def _hear(self) -> None:
        while message := self._listener.recv(4096):
            self.told.update(message.decode().splitlines())

    def _collect(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

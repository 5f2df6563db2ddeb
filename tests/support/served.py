"""`quire serve` as a user runs it: real processes, a real Redis, the demo model, a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 60


class Served:
    """A running service. Its printed lines are collected, so that a failed test can show them."""

    def __init__(self, data_dir: Path, *flags: str):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        command = [sys.executable, "-m", "service.cli.entry", "serve", "--port", "0", "--device", "cpu"]
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(data_dir), *flags],
            cwd=REPOSITORY,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()
        try:
            self.url = self._await_line(r"Quire serves (?P<name>\S+) at (?P<found>https?://\S+)")
            self.redis_url = self._await_line(r"Queue producers: (?P<found>\S+)")
        except BaseException:
            self.kill()
            raise

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def descendants(self) -> set[int]:
        """Return the process ids of all its descendants."""
        return descendants_of(self.process.pid)

    def terminate(self, number: int = signal.SIGTERM, timeout_s: float = 30) -> int:
        """Send the signal and wait for the end; return the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        self._collector.join(timeout_s)
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._collector.join(10)

    def _collect(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
        self.process.stdout.close()

    def _await_line(self, pattern: str) -> str:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.output):
                return found["found"]
            if self.process.poll() is not None:
                self._collector.join(5)
                break
            time.sleep(0.05)
        raise AssertionError(f"quire serve did not become ready:\n{self.output}")


def descendants_of(ancestor: int) -> set[int]:
    """Return the process ids of all descendants of a process."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found = {ancestor}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


def alive(pids: set[int]) -> set[int]:
    """Return the processes that still run (a zombie does not)."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            running.add(pid)
    return running

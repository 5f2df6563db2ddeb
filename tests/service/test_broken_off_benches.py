"""Benches that are broken off: their processes end with them, at once and without a word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.served import REPOSITORY, alive, descendants_of

MANY = [{"prompt_tokens": 100, "output_tokens": 400} for _ in range(2000)]


@pytest.fixture
def simulation(tmp_path):
    """`quire bench memory`, as a shell starts it, with two processes at work for longer than any test waits."""
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"requests": MANY}))
    flags = ("--trace", str(trace), "--num-requests", "2000", "--simulate", "opt-13b-a100", "--rates", "0")
    command = [sys.executable, "-m", "service.cli.entry", "bench", "memory", *flags]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def at_work(process: subprocess.Popen[str]) -> set[int]:
    """The processes that it has started, once there are some that simulate."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = descendants_of(process.pid)
        if any(b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive(found)):
            return found
        time.sleep(0.02)
    raise AssertionError("no process was started")


def ended(pids: set[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


@pytest.mark.skipif(os.cpu_count() < 2, reason="on one core a simulation starts no processes")
def test_ctrl_c_ends_a_simulation_without_a_word(simulation):
    processes = at_work(simulation)
    os.killpg(simulation.pid, signal.SIGINT)
    assert simulation.wait(timeout=20) == 128 + signal.SIGINT
    assert simulation.stderr.read() == ""
    assert ended(processes, 20)


@pytest.mark.skipif(os.cpu_count() < 2, reason="on one core a simulation starts no processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_simulation_that_is_killed_leaves_nothing_behind(simulation, number):
    processes = at_work(simulation)
    simulation.send_signal(number)
    simulation.wait(timeout=20)
    assert ended(processes, 20)

"""A child's first lines: its address, or why it did not start."""

from __future__ import annotations

import asyncio

import pytest

from service.cli.lifecycle import STARTED_BY_SERVE
from service.cli.main import main
from service.cli.processes import children
from service.cli.processes.children import ChildProcess, RestartingChild
from service.config.settings import WORKER, Settings
from service.errors import StartupError


class Ended:
    """A process that has printed `text`."""

    pid = 1

    def __init__(self, text: str, status: int) -> None:
        self.returncode = status
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(text.encode())
        self.stdout.feed_eof()

    async def wait(self) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("statuses", "restarts_s", "num_starts", "levels"),
    [
        ([0, -15, 130, 0, 1, -9], (0.0,), 6, ["INFO"] * 4 + ["ERROR", "CRITICAL"]),
        ([0], (), 1, ["INFO"]),
        ([1], (), 1, ["CRITICAL"]),
    ],
)
async def test_an_end_after_a_signal_is_no_failure(statuses, restarts_s, num_starts, levels, monkeypatch, caplog):
    left = iter(statuses)

    class Child:
        pid = 1

        @classmethod
        async def start(cls, verb, settings, environ):
            starts.append(verb)
            return cls()

        async def wait_ready(self):
            return ""

        async def wait(self):
            return next(left)

    starts: list[str] = []
    caplog.set_level("INFO", "quire.serve")
    monkeypatch.setattr(children, "ChildProcess", Child)
    child = RestartingChild(WORKER, Settings(), restarts_s=restarts_s)
    await child.start()
    assert await child.keep_running() == statuses[-1]
    assert len(starts) == num_starts
    assert [record.levelname for record in caplog.records] == levels


async def first_line(text: str, status: int = 2) -> str:
    return await ChildProcess("worker-1", Ended(text, status), 1.0).wait_ready()


async def test_a_ready_line_and_what_ends_a_start():
    assert await first_line("a library's greeting\nready http://127.0.0.1:8000\n") == "http://127.0.0.1:8000"
    with pytest.raises(StartupError, match=r"^worker-1: did not start \(exit status 2"):
        await first_line("")
    with pytest.raises(StartupError, match=r"^worker-1: did not start \(ended by SIGKILL\)"):
        await first_line("", -9)


async def test_a_child_s_error_is_its_parent_s(monkeypatch, capsys):
    monkeypatch.setenv(STARTED_BY_SERVE, "1")
    monkeypatch.delenv("QUIRE_REDIS_URL", raising=False)
    assert await asyncio.to_thread(main, ["gateway", "--model", "no/such/folder"]) == 2
    printed = capsys.readouterr()
    with pytest.raises(StartupError, match=r"^--model: no/such/folder: no such folder"):
        await first_line(printed.out)
    assert printed.err == ""

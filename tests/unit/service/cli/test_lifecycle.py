"""Signals to a process of the service."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from service.cli import lifecycle


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGTERM, signal.SIGTERM], 0),  # a supervisor's and the parent's
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGINT], 130),
        ([lifecycle.AT_ONCE], 130),
    ],
)
def test_a_second_ctrl_c_ends_without_draining(monkeypatch, numbers, status):
    exits = []
    monkeypatch.setattr(lifecycle, "_exit", exits.append)

    async def run(stop):
        for number in numbers:
            os.kill(os.getpid(), number)
            await stop.wait()
            await asyncio.sleep(0.02)
        assert stop.at_once.is_set() == (status != 0)

    assert lifecycle.run_until_signalled(run) == 0
    assert exits == [status] * (status != 0)

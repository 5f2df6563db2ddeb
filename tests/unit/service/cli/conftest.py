"""Signal handlers, as each test found them."""

from __future__ import annotations

import signal

import pytest

from service.cli import lifecycle


@pytest.fixture(autouse=True)
def restore_handlers():
    """A closed uvloop loop leaves its handlers to the process, and so to other tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, lifecycle.AT_ONCE)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

"""The end of a process, as its signals ask for it."""

from __future__ import annotations

import asyncio


class Shutdown(asyncio.Event):
    """Set once the process is to drain and end; `at_once` is set too if it is not to wait for open requests."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

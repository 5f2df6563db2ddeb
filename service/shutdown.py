"""Shutdown of a process by its signals."""

from __future__ import annotations

import asyncio


class Shutdown(asyncio.Event):
    """Set when the process is to drain and exit; `at_once` is set too if it must not wait for open requests."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

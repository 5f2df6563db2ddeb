"""Watchdog: a hung step raises no error, and its jobs would wait forever."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from service.observability.logs import fields
from service.observability.systemd import Supervisor
from service.worker.engine_thread import EngineThread

log = logging.getLogger("quire.watchdog")

DEFAULT_STEP_TIMEOUT_S = {"cuda": 60.0, "numpy": 600.0}
LAST_RESORT_S = 10.0
"""Time to return jobs once a step counts as hung."""
LOOKS_PER_TIMEOUT = 20
MAX_LOOK_EVERY_S = 1.0


class EngineHung(Exception):
    """Raised for a step longer than --step-timeout."""


class Watchdog:
    """Watchdog of the thread that calls `on_turn` between steps. `on_hang` gets an EngineHung once, on another thread.

    If the hung step holds the GIL, faulthandler's C thread, which `on_turn` postpones, prints all stacks and ends the
    process.
    """

    def __init__(self, step_timeout_s: float, supervisor: Supervisor):
        self._step_timeout_s = step_timeout_s
        self._supervisor = supervisor
        self._postponed_at_s = float("-inf")
        self._look_every_s = min(MAX_LOOK_EVERY_S, step_timeout_s / LOOKS_PER_TIMEOUT)
        self._stopped = threading.Event()
        self._stderr = sys.__stderr__ or sys.stderr

    def on_turn(self, now_s: float) -> None:
        """Postpone the end of the process. `now_s`: monotonic."""
        self._supervisor.feed()
        if now_s - self._postponed_at_s >= self._look_every_s and not self._stopped.is_set():
            self._postponed_at_s = now_s
            faulthandler.dump_traceback_later(self._step_timeout_s + LAST_RESORT_S, exit=True, file=self._stderr)

    def watch(self, engine: EngineThread, on_hang: Callable[[EngineHung], None]) -> None:
        threading.Thread(target=self._watch, args=(engine, on_hang), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self, engine: EngineThread, on_hang: Callable[[EngineHung], None]) -> None:
        while not self._stopped.wait(self._look_every_s):
            if engine.silent_s > self._step_timeout_s:
                log.critical("the engine hangs %s", fields(silent_s=engine.silent_s, at=_place_of(engine.ident)))
                on_hang(EngineHung(f"a step took longer than {self._step_timeout_s:g} s"))
                return


def _place_of(thread: int | None) -> str:
    frame = None if thread is None else sys._current_frames().get(thread)
    lines = traceback.extract_stack(frame)[-3:] if frame is not None else []
    return " < ".join(f"{line.name}:{line.lineno}" for line in reversed(lines)) or "unknown"

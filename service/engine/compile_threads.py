from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from service.observability.logs import fields

log = logging.getLogger("quire.engine")

MAX_LOST_THREADS = 8
"""Maximum threads replaced; lost threads may still compute."""


class CompileCall:
    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.future: Future[Any] = Future()
        self.call = call
        self.args = args
        self.began_at_s: float | None = None

    def runs_for_s(self) -> float:
        return 0.0 if self.began_at_s is None else time.monotonic() - self.began_at_s


Calls = queue.SimpleQueue[CompileCall | None]
"""None: the threads end."""


class CompileThreads:
    """Threads that end once this object is garbage."""

    def __init__(self, num_threads: int) -> None:
        self._calls: Calls = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        self._num_lost = 0
        for _ in range(num_threads):
            self._add_thread()

    def submit(self, call: Callable[..., Any], *args: Any) -> CompileCall:
        submitted = CompileCall(call, args)
        self._calls.put(submitted)
        return submitted

    def give_up(self, call: CompileCall) -> None:
        """Replace the thread that runs this call."""
        self._num_lost += 1
        log.error("a grammar is given up %s", fields(seconds=round(call.runs_for_s(), 1), num_given_up=self._num_lost))
        if self._num_lost <= MAX_LOST_THREADS:
            self._add_thread()

    def _add_thread(self) -> None:
        threading.Thread(target=_work, args=(self._calls,), name="grammar", daemon=True).start()


def _work(calls: Calls) -> None:
    while (submitted := calls.get()) is not None:
        _run(submitted)
        del submitted
    calls.put(None)  # for the next thread


def _run(submitted: CompileCall) -> None:
    submitted.began_at_s = time.monotonic()
    try:
        submitted.future.set_result(submitted.call(*submitted.args))
    except BaseException as error:  # raised where the result is read
        submitted.future.set_exception(error)

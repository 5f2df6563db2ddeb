from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from service.observability.logs import fields

log = logging.getLogger("quire.engine")

MAX_LOST_THREADS = 8
"""Lost threads may still compute."""


class CompileCall:
    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.future: Future[Any] = Future()
        self.call = call
        self.args = args
        self.began_at_s: float | None = None

    def runs_for_s(self) -> float:
        return 0.0 if self.began_at_s is None else time.monotonic() - self.began_at_s


class CompileThreads:
    def __init__(self, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[CompileCall] = queue.SimpleQueue()
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
        threading.Thread(target=self._work, name="grammar", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._run(self._calls.get())

    @staticmethod
    def _run(submitted: CompileCall) -> None:
        submitted.began_at_s = time.monotonic()
        try:
            submitted.future.set_result(submitted.call(*submitted.args))
        except BaseException as error:  # raised where the result is read
            submitted.future.set_exception(error)

"""Threads for what would hold up the event loop: parsing, validating, tokenising. Fair between tenants."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Found = TypeVar("Found")

NUM_THREADS = 4
OWN = ""
"""The tenant of what the gateway does for itself."""


@dataclass(eq=False)
class _Call:
    tenant: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]


class TextThreads:
    """A tenant has at most all threads but one at a time; tenants that wait take turns. The process does not wait for
    the threads when it ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Call]] = {}  # by tenant, in the order of their turns
        self._running: Counter[str] = Counter()  # by tenant
        self._is_closed = False
        self._probe: asyncio.Task[None] | None = None
        for number in range(NUM_THREADS):
            threading.Thread(target=self._work, name=f"text_{number}", daemon=True).start()

    async def run(self, tenant: str, call: Callable[..., Found], *args: Any) -> Found:
        """What `call` returns or raises. Where it is not waited for any more, it gives up its place."""
        loop = asyncio.get_running_loop()
        entry = _Call(tenant, call, args, loop, loop.create_future())
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(entry)
            self._changed.notify()
        try:
            return await entry.result
        except asyncio.CancelledError:
            with self._changed:
                self._remove(entry)
            raise
        finally:
            # An error's traceback holds this frame, and the entry the error and what `call` was given: such a circle
            # would stay, body and all, until the garbage collector comes by.
            del entry

    async def answer(self, within_s: float) -> bool:
        """Whether a thread takes up a new call in time."""
        with self._changed:
            if self._running.total() < NUM_THREADS:
                return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self.run(OWN, _nothing))
        done, _ = await asyncio.wait({self._probe}, timeout=within_s)
        return bool(done)

    def close(self) -> None:
        """Does not wait for what runs."""
        if self._probe is not None:
            self._probe.cancel()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (entry := self._take()) is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
            found = error = None
            try:
                found = entry.call(*entry.args)
            except BaseException as raised:  # it is the caller's
                error = raised
            with self._changed:
                self._running[entry.tenant] -= 1
                if not self._running[entry.tenant]:
                    del self._running[entry.tenant]
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                entry.loop.call_soon_threadsafe(_settle, entry.result, found, error)
            del entry, found, error

    def _take(self) -> _Call | None:
        tenants = (name for name in self._waiting if self._running[name] < NUM_THREADS - 1)
        tenant = next(tenants, None)
        if tenant is None:
            return None
        entry = self._waiting[tenant][0]
        self._remove(entry)
        if tenant in self._waiting:
            self._waiting[tenant] = self._waiting.pop(tenant)
        self._running[tenant] += 1
        return entry

    def _remove(self, entry: _Call) -> None:
        own = self._waiting.get(entry.tenant, deque())
        with contextlib.suppress(ValueError):
            own.remove(entry)
        if not own:
            self._waiting.pop(entry.tenant, None)


def _settle(result: asyncio.Future[Any], found: Any, error: BaseException | None) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(found)


def _nothing() -> None:
    return None

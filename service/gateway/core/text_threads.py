"""Threads for parsing, validation and tokenization, shared fairly by tenants."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

NUM_THREADS = 4
SMALL_BYTES = 8 << 10
"""Parsed within a millisecond, which is less than a thread switch costs."""
OWN = ""
"""The tenant of the gateway's own calls."""


@dataclass(eq=False)
class _Call:
    tenant: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]


class TextThreads:
    """Thread pool in which waiting tenants take turns. One tenant occupies at most NUM_THREADS - 1 threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Call]] = {}  # by tenant, in turn order
        self._running: Counter[str] = Counter()  # by tenant
        self._is_closed = False
        self._probe: asyncio.Task[None] | None = None
        for number in range(NUM_THREADS):
            threading.Thread(target=self._work, name=f"text_{number}", daemon=True).start()

    async def run(self, tenant: str, call: Callable[..., Result], *args: Any) -> Result:
        """Return or raise what `call` does. Cancelling removes a waiting call."""
        loop = asyncio.get_running_loop()
        entry = _Call(tenant, call, args, loop, loop.create_future())
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(entry)
            self._changed.notify()
        try:
            result: Result = await entry.result
            return result
        except asyncio.CancelledError:
            with self._changed:
                self._remove(entry)
            raise
        finally:
            # Break the cycle error -> traceback -> frame -> entry -> error, which would keep a body alive until garbage
            # collection.
            del entry

    async def run_sized(self, num_bytes: int, tenant: str, call: Callable[..., Result], *args: Any) -> Result:
        """Run `call` on the event loop if its input has at most SMALL_BYTES, else on a thread."""
        return call(*args) if num_bytes <= SMALL_BYTES else await self.run(tenant, call, *args)

    async def responds(self, within_s: float) -> bool:
        """Return whether a thread picks up a new call in time."""
        with self._changed:
            if self._running.total() < NUM_THREADS:
                return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self.run(OWN, _nothing))
        done, _ = await asyncio.wait({self._probe}, timeout=within_s)
        return bool(done)

    def close(self) -> None:
        """End idle threads, without waiting for running calls."""
        if self._probe is not None:
            self._probe.cancel()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (entry := self._next_call()) is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
            result: Any = None
            error: BaseException | None = None
            try:
                result = entry.call(*entry.args)
            except BaseException as raised:  # re-raised in the caller
                error = raised
            with self._changed:
                self._running[entry.tenant] -= 1
                if not self._running[entry.tenant]:
                    del self._running[entry.tenant]
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                entry.loop.call_soon_threadsafe(_settle, entry.result, result, error)
            del entry, result, error

    def _next_call(self) -> _Call | None:
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


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _nothing() -> None:
    return None

"""Chooses the batches that a gateway runs, and limits their lines in flight."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence

from service.queue.records import OpenBatch

MAX_BATCHES = 4
MAX_BATCHES_PER_TENANT = 2
"""Both limits are per gateway; other batches wait in the queue, outside its memory."""
MAX_LINES_IN_FLIGHT = 64
"""Over all batches of a gateway: enough to fill an idle machine, few enough to yield it soon."""
MAX_LINE_BYTES_IN_FLIGHT = 16 << 20


class BatchTurns:
    """Round-robin over tenants; oldest batch first within a tenant."""

    def __init__(self) -> None:
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0

    def next_batches(self, waiting: Sequence[OpenBatch], running: Collection[str]) -> Iterator[OpenBatch]:
        """Yield the batches to start, in order, up to the limits.

        `running`: the tenants of running batches, to which the caller adds each batch it starts.
        """
        by_tenant: dict[str, deque[OpenBatch]] = {}
        for batch in waiting:
            by_tenant.setdefault(batch.tenant, deque()).append(batch)
        self._last_turn = {tenant: turn for tenant, turn in self._last_turn.items() if tenant in by_tenant}
        while by_tenant and len(running) < MAX_BATCHES:
            counts = Counter(running)
            tenant = min(by_tenant, key=lambda name: (counts[name], self._last_turn.get(name, 0)))
            if counts[tenant] >= MAX_BATCHES_PER_TENANT:
                return
            batch = by_tenant[tenant].popleft()
            if not by_tenant[tenant]:
                del by_tenant[tenant]
            yield batch

    def record_start(self, batch: OpenBatch) -> None:
        self._num_turns += 1
        self._last_turn[batch.tenant] = self._num_turns


class LineSlots:
    """Limits the lines in flight. Slots are granted first come, first served; each batch requests one at a time."""

    def __init__(self, num_lines: int = MAX_LINES_IN_FLIGHT, num_bytes: int = MAX_LINE_BYTES_IN_FLIGHT) -> None:
        self._num_lines = num_lines
        self._num_bytes = num_bytes
        self._turn = asyncio.Lock()  # a fair lock, held by the first waiter
        self._freed = asyncio.Event()

    async def acquire(self, num_bytes: int) -> None:
        """Wait for a slot. A line above the byte limit counts as the limit."""
        async with self._turn:
            while not self._num_lines or self._num_bytes < self._counted(num_bytes):
                self._freed.clear()
                await self._freed.wait()
            self._num_lines -= 1
            self._num_bytes -= self._counted(num_bytes)

    def release(self, num_bytes: int) -> None:
        self._num_lines += 1
        self._num_bytes += self._counted(num_bytes)
        self._freed.set()

    def _counted(self, num_bytes: int) -> int:
        return min(num_bytes, MAX_LINE_BYTES_IN_FLIGHT)

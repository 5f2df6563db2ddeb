"""Which batches a gateway works on, and how many of their lines at once."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence

from service.queue.batches import OpenBatch

MAX_BATCHES = 4
MAX_BATCHES_PER_TENANT = 2
"""Of one gateway. All others wait in the queue, outside the gateway's memory."""
MAX_LINES_IN_FLIGHT = 64
"""Of all batches of one gateway: enough to fill a machine that is idle, few enough to leave again soon."""
MAX_LINE_BYTES_IN_FLIGHT = 16 << 20


class BatchTurns:
    """Tenants take turns; a tenant's batches go by age."""

    def __init__(self) -> None:
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0

    def next_batches(self, waiting: Sequence[OpenBatch], running: Collection[str]) -> Iterator[OpenBatch]:
        """The batches that may be taken up, in their order, as long as there is room. `running`: by the tenants of
        those that are at work; to be kept up to date by whoever takes one up."""
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

    def took(self, batch: OpenBatch) -> None:
        self._num_turns += 1
        self._last_turn[batch.tenant] = self._num_turns


class LineSlots:
    """Room for lines in flight. Those who wait for some get it in the order in which they came; a batch waits for one
    line at a time, so batches take turns."""

    def __init__(self, num_lines: int = MAX_LINES_IN_FLIGHT, num_bytes: int = MAX_LINE_BYTES_IN_FLIGHT) -> None:
        self._num_lines = num_lines
        self._num_bytes = num_bytes
        self._turn = asyncio.Lock()  # fair: held by the first that waits
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """A line longer than all room counts as all of it."""
        async with self._turn:
            while not self._num_lines or self._num_bytes < self._counted(num_bytes):
                self._freed.clear()
                await self._freed.wait()
            self._num_lines -= 1
            self._num_bytes -= self._counted(num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self._num_lines += 1
        self._num_bytes += self._counted(num_bytes)
        self._freed.set()

    def _counted(self, num_bytes: int) -> int:
        return min(num_bytes, MAX_LINE_BYTES_IN_FLIGHT)

"""Bytes charged to tenants, in memory: the reference of `ledger.lua`."""

from __future__ import annotations

import time
from collections import defaultdict

from service.queue.records import UNLIMITED, StorageFull, StorageLimits


class MemoryLedger:
    """Charges by tenant and name. `max_memory_bytes` limits all tenants and the queue's share; None: no limit."""

    def __init__(self, max_memory_bytes: int | None = None) -> None:
        self.max_memory_bytes = max_memory_bytes
        self._sizes: defaultdict[str, dict[str, tuple[int, float]]] = defaultdict(dict)  # bytes, monotonic end

    def taken(self, tenant: str, name: str | None = None) -> int:
        """Return the bytes of one name, or of all."""
        sizes, now_s = self._sizes[tenant], time.monotonic()
        for gone in [each for each, (_, until_s) in sizes.items() if until_s <= now_s]:
            del sizes[gone]
        if name is not None:
            return sizes.get(name, (0, 0.0))[0]
        return sum(num_bytes for num_bytes, _ in sizes.values())

    def charge(self, tenant: str, name: str, change: int, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        """Charge `change` more bytes for `name`. Raises StorageFull and changes nothing."""
        before = self.taken(tenant, name)
        change = max(change, -before)
        if change > 0:
            self._check(tenant, change, limits)
        self._sizes[tenant][name] = (before + change, time.monotonic() + for_s)

    def release(self, tenant: str, name: str) -> None:
        self._sizes[tenant].pop(name, None)

    def _check(self, tenant: str, more: int, limits: StorageLimits) -> None:
        own, quota = self.taken(tenant), limits.max_bytes_per_tenant
        if quota is not None and own + more > quota:
            raise StorageFull(of_tenant=True, num_bytes=own, max_bytes=quota)
        if limits.queue_share is None or self.max_memory_bytes is None:
            return
        used, bound = sum(map(self.taken, list(self._sizes))), int(self.max_memory_bytes * (1 - limits.queue_share))
        if used + more > bound:
            raise StorageFull(of_tenant=False, num_bytes=used, max_bytes=bound)

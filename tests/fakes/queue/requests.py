"""What the queue in memory keeps of requests, beside their jobs."""

from __future__ import annotations

import time
from dataclasses import replace

from service.queue import keys
from service.queue.codec import encode
from service.queue.messages import RequestRecord
from service.queue.steady_time import unix_s
from service.queue.storage import OVERHEAD_BYTES, UNLIMITED, StorageFull, StorageLimits
from tests.fakes.queue.ledger import MemoryLedger


class MemoryRequests:
    """Records, idempotency keys and marks, each until its time is over."""

    def __init__(self):
        self.ledger = MemoryLedger()
        self._records: dict[str, tuple[RequestRecord, float]] = {}
        self._holders: dict[str, tuple[str, float]] = {}
        self._watched: dict[str, float] = {}

    def remember(self, record: RequestRecord, idempotency: str | None, limits: StorageLimits = UNLIMITED) -> str:
        now_s = unix_s()
        self._forget_old(now_s)
        holder, _ = self._holders.get(idempotency, (record.request_id, 0.0))
        if holder != record.request_id and self.recall(holder) is not None:
            return holder
        until_s = record.deadline_s + keys.LOG_ENDED_TTL_S
        self._charge(record, until_s - now_s, limits.max_record_bytes)
        if idempotency is not None:
            self._holders[idempotency] = (record.request_id, until_s)
        self._records[record.request_id] = (record, until_s)
        return record.request_id

    def remember_submitted(self, record: RequestRecord, limits: StorageLimits) -> None:
        """With its first job. Raises StorageFull where the request needs its record."""
        if record.stays:
            self.remember(record, None, limits)
            return
        try:
            self.remember(record, None, replace(limits, max_bytes_per_tenant=limits.max_record_bytes))
        except StorageFull:
            return  # nobody goes on with it

    def recall(self, request_id: str) -> RequestRecord | None:
        record, until_s = self._records.get(request_id, (None, 0.0))
        return record if until_s > unix_s() else None

    def forget(self, request_id: str, tenant: str, idempotency: str | None) -> None:
        self._records.pop(request_id, None)
        if self._holders.get(idempotency, ("", 0.0))[0] == request_id:
            del self._holders[idempotency]
        self.ledger.release(tenant, request_id)

    def watch(self, request_id: str, for_s: float) -> None:
        self._watched[request_id] = time.monotonic() + for_s

    def is_watched(self, request_id: str) -> bool:
        return self._watched.get(request_id, 0.0) > time.monotonic()

    def _charge(self, record: RequestRecord, for_s: float, quota: int | None) -> None:
        change = len(encode(record)) + OVERHEAD_BYTES - self.ledger.taken(record.tenant, record.request_id)
        limits = StorageLimits(max_bytes_per_tenant=quota)
        self.ledger.charge(record.tenant, record.request_id, change, for_s, limits)

    def _forget_old(self, now_s: float) -> None:
        for kept in (self._records, self._holders):
            for name in [name for name, (_, until_s) in kept.items() if until_s <= now_s]:
                del kept[name]
        for name in [name for name, until_s in self._watched.items() if until_s <= time.monotonic()]:
            del self._watched[name]

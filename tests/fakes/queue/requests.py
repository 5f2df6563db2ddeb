"""Records of requests, in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from service.queue import keys
from service.queue.codec import encode
from service.queue.messages import RequestRecord
from service.queue.records import OVERHEAD_BYTES, UNLIMITED, StorageFull, StorageLimits
from tests.fakes.queue.ledger import MemoryLedger
from tests.fakes.queue.steady_time import unix_s


class MemoryRequestStore:
    """Implements RequestStore."""

    def __init__(self, data: JobsAndRequests) -> None:
        self._data = data

    async def put_request(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        return self._data.requests.put(record, idempotency, limits)

    async def get_request(self, request_id: str) -> RequestRecord | None:
        keys.request(request_id)
        return self._data.requests.get(request_id)

    async def find_holder(self, idempotency: str) -> str | None:
        return self._data.requests.holder(idempotency)

    async def drop_request(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        if unless_there is None or not self._data.has(unless_there):
            self._data.requests.drop(request_id, tenant, idempotency)

    async def mark_watched(self, request_id: str, for_s: float) -> None:
        self._data.requests.mark_watched(request_id, for_s)

    async def is_watched(self, request_id: str) -> bool:
        return self._data.requests.is_watched(request_id)


class JobsAndRequests(Protocol):
    """The part of QueueData that the store uses."""

    requests: RequestData

    def has(self, job_id: str) -> bool: ...


class RequestData:
    """Records, idempotency keys and marks, each until it expires; shared by several queues."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        self._records: dict[str, tuple[RequestRecord, float]] = {}
        self._holders: dict[str, tuple[str, float]] = {}
        self._watched: dict[str, float] = {}

    def put(self, record: RequestRecord, idempotency: str | None, limits: StorageLimits = UNLIMITED) -> str:
        now_s = unix_s()
        self._drop_expired(now_s)
        holder, _ = self._holders.get(idempotency, (record.request_id, 0.0))
        if holder != record.request_id and self.get(holder) is not None:
            return holder
        until_s = record.deadline_s + keys.LOG_ENDED_TTL_S
        self._charge(record, until_s - now_s, limits.max_record_bytes)
        if idempotency is not None:
            self._holders[idempotency] = (record.request_id, until_s)
        self._records[record.request_id] = (record, until_s)
        return record.request_id

    def put_submitted(self, record: RequestRecord, limits: StorageLimits) -> None:
        """Keep a record with its first job. Raises StorageFull if the request needs its record."""
        if record.stays:
            self.put(record, None, limits)
            return
        try:
            self.put(record, None, replace(limits, max_bytes_per_tenant=limits.max_record_bytes))
        except StorageFull:
            return  # the request runs without a record

    def get(self, request_id: str) -> RequestRecord | None:
        record, until_s = self._records.get(request_id, (None, 0.0))
        return record if until_s > unix_s() else None

    def holder(self, idempotency: str) -> str | None:
        holder, until_s = self._holders.get(idempotency, (None, 0.0))
        return holder if until_s > unix_s() else None

    def drop(self, request_id: str, tenant: str, idempotency: str | None) -> None:
        self._records.pop(request_id, None)
        if self._holders.get(idempotency, ("", 0.0))[0] == request_id:
            del self._holders[idempotency]
        self.ledger.release(tenant, request_id)

    def mark_watched(self, request_id: str, for_s: float) -> None:
        self._watched[request_id] = time.monotonic() + for_s

    def is_watched(self, request_id: str) -> bool:
        return self._watched.get(request_id, 0.0) > time.monotonic()

    def _charge(self, record: RequestRecord, for_s: float, quota: int | None) -> None:
        change = len(encode(record)) + OVERHEAD_BYTES - self.ledger.taken(record.tenant, record.request_id)
        limits = StorageLimits(max_bytes_per_tenant=quota)
        self.ledger.charge(record.tenant, record.request_id, change, for_s, limits)

    def _drop_expired(self, now_s: float) -> None:
        for kept in (self._records, self._holders):
            for name in [name for name, (_, until_s) in kept.items() if until_s <= now_s]:
                del kept[name]
        for name in [name for name, until_s in self._watched.items() if until_s <= time.monotonic()]:
            del self._watched[name]

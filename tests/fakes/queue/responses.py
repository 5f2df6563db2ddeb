"""Responses, in memory."""

from __future__ import annotations

import time

from service.queue import keys
from service.queue.records import (
    OVERHEAD_BYTES,
    UNLIMITED,
    StorageLimits,
    StoredResponse,
    pack_response,
    unpack_response,
)
from tests.fakes.queue.ledger import MemoryLedger

ResponseData = dict[str, tuple[bytes, float]]
"""Records by id, each with its monotonic end. Shared by several queues."""


class MemoryResponseStore:
    """Implements ResponseStore."""

    def __init__(self, responses: ResponseData, ledger: MemoryLedger) -> None:
        self._responses = responses
        self._response_ledger = ledger

    async def put_response(self, record: StoredResponse, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        keys.response(record.response_id)
        packed, now_s = pack_response(record), time.monotonic()
        for name in [name for name, (_, until_s) in self._responses.items() if until_s <= now_s]:
            del self._responses[name]
        change = len(packed) + OVERHEAD_BYTES - self._response_ledger.taken(record.tenant, record.response_id)
        self._response_ledger.charge(record.tenant, record.response_id, change, for_s, limits)
        self._responses[record.response_id] = (packed, time.monotonic() + for_s)  # no charge outlives its record

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        if await self.get_response(record.response_id) is not None:
            await self.put_response(record, for_s)

    async def get_response(self, response_id: str) -> StoredResponse | None:
        keys.response(response_id)
        packed, until_s = self._responses.get(response_id, (b"", 0.0))
        return unpack_response(packed) if until_s > time.monotonic() else None

    async def drop_response(self, record: StoredResponse) -> None:
        keys.response(record.response_id)
        self._responses.pop(record.response_id, None)
        self._response_ledger.release(record.tenant, record.response_id)

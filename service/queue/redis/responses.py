"""Responses on Redis."""

from __future__ import annotations

from service.queue import keys
from service.queue.redis.ledger import charge_args, checked, stored_keys
from service.queue.redis.link import RedisLink
from service.queue.responses import StoredResponse, pack_response, unpack_response
from service.queue.storage import OVERHEAD_BYTES, UNLIMITED, StorageLimits


class RedisResponses:
    """Implements ResponseStore."""

    def __init__(self, link: RedisLink):
        self._link = link

    async def put_response(self, record: StoredResponse, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        await self._store(record, for_s, limits, replaces=False)

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        await self._store(record, for_s, UNLIMITED, replaces=True)

    async def response(self, response_id: str) -> StoredResponse | None:
        key = keys.response(response_id)
        async with self._link.commands() as redis:
            packed = await redis.get(key)
        return None if packed is None else unpack_response(packed)

    async def drop_response(self, record: StoredResponse) -> None:
        script_keys = [*stored_keys(record.tenant), keys.response(record.response_id)]
        await self._link.script("drop", script_keys, [record.response_id])

    async def _store(self, record: StoredResponse, for_s: float, limits: StorageLimits, *, replaces: bool) -> None:
        packed = pack_response(record)
        script_keys = [*stored_keys(record.tenant), keys.response(record.response_id)]
        charged = charge_args(record.response_id, len(packed) + OVERHEAD_BYTES, for_s, limits)
        checked(await self._link.script("store", script_keys, [*charged, packed, int(replaces)]))

"""Responses on Redis."""

from __future__ import annotations

from service.wire import keys
from service.wire.redis_link import RedisLink
from service.wire.responses import StoredResponse, pack_response, unpack_response


class RedisResponses:
    """Implements ResponseStore."""

    def __init__(self, link: RedisLink):
        self._link = link

    async def put_response(self, record: StoredResponse, for_s: float) -> None:
        await self._set(record, for_s, only_if_there=False)

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        await self._set(record, for_s, only_if_there=True)

    async def response(self, response_id: str) -> StoredResponse | None:
        key = keys.response(response_id)
        async with self._link.commands() as redis:
            packed = await redis.get(key)
        return None if packed is None else unpack_response(packed)

    async def drop_response(self, response_id: str) -> None:
        key = keys.response(response_id)
        async with self._link.commands() as redis:
            await redis.delete(key)

    async def _set(self, record: StoredResponse, for_s: float, *, only_if_there: bool) -> None:
        key, life_ms = keys.response(record.response_id), max(1, int(for_s * 1000))
        async with self._link.commands() as redis:
            await redis.set(key, pack_response(record), px=life_ms, xx=only_if_there)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from service.queue import keys
from service.queue.codec import decode, encode
from service.queue.messages import RequestRecord
from service.queue.records import (
    OVERHEAD_BYTES,
    UNLIMITED,
    AdapterRecord,
    StorageLimits,
    StoredResponse,
    pack_adapter,
    pack_response,
    unpack_adapter,
    unpack_response,
)
from service.queue.redis.link import RedisLink
from service.queue.redis.script_args import charge_args, checked, life_ms, record_keys, record_life_s, stored_keys


class RedisResponseStore:
    """Implementation of ResponseStore."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def put_response(self, record: StoredResponse, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        await self._store(record, for_s, limits, replaces=False)

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        await self._store(record, for_s, UNLIMITED, replaces=True)

    async def get_response(self, response_id: str) -> StoredResponse | None:
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


class RedisAdapterStore:
    """Implementation of AdapterStore."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def put_adapter(self, record: AdapterRecord, *, replaces: bool) -> bool:
        args = [record.name, pack_adapter(record), int(replaces)]
        return bool(await self._link.script("put_adapter", [keys.ADAPTERS], args))

    async def get_adapter(self, name: str) -> AdapterRecord | None:
        async with self._link.commands() as redis:
            packed = await redis.hget(keys.ADAPTERS, name)
        return None if packed is None else unpack_adapter(packed)

    async def list_adapters(self) -> Sequence[AdapterRecord]:
        async with self._link.commands() as redis:
            packed = await redis.hvals(keys.ADAPTERS)
        return sorted(map(unpack_adapter, packed), key=lambda record: record.name)

    async def drop_adapter(self, name: str) -> bool:
        async with self._link.commands() as redis:
            return bool(await redis.hdel(keys.ADAPTERS, name))


class RedisRequestStore:
    """Implementation of RequestStore."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def put_request(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        payload = encode(record)
        life_s = record_life_s(record, await self._link.now_s())
        limits = replace(limits, max_bytes_per_tenant=limits.max_record_bytes)
        script_keys = [*record_keys(record.tenant), keys.request(record.request_id)]
        if idempotency is not None:
            script_keys.append(keys.idempotency(idempotency))
        prefix, _, suffix = keys.request("-").partition("-")
        charged = charge_args(record.request_id, len(payload) + OVERHEAD_BYTES, life_s, limits)
        args = [*charged, payload, prefix, suffix]
        _, holder = checked(await self._link.script_until_known("remember", script_keys, args))
        return str(holder.decode())

    async def get_request(self, request_id: str) -> RequestRecord | None:
        key = keys.request(request_id)
        async with self._link.commands() as redis:
            payload = await redis.get(key)
        return None if payload is None else decode(RequestRecord, payload)

    async def find_holder(self, idempotency: str) -> str | None:
        async with self._link.commands() as redis:
            holder = await redis.get(keys.idempotency(idempotency))
        return None if holder is None else str(holder.decode())

    async def drop_request(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        script_keys = [*record_keys(tenant), keys.request(request_id)]
        if idempotency is not None:
            script_keys.append(keys.idempotency(idempotency))
        log_key = "" if unless_there is None else keys.events(unless_there)
        await self._link.script("forget", script_keys, [request_id, unless_there or "", log_key])

    async def mark_watched(self, request_id: str, for_s: float) -> None:
        async with self._link.commands() as redis:
            await redis.set(keys.watched(request_id), b"1", px=life_ms(for_s))

    async def is_watched(self, request_id: str) -> bool:
        async with self._link.commands() as redis:
            return bool(await redis.exists(keys.watched(request_id)))

"""What the Redis queue keeps of requests, beside their jobs: records, idempotency keys, who waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from service.queue import keys
from service.queue.codec import decode, encode
from service.queue.messages import Event, RequestRecord
from service.queue.redis.ledger import charge_args, checked, life_ms, record_keys
from service.queue.redis.link import RedisLink
from service.queue.storage import OVERHEAD_BYTES, UNLIMITED, StorageLimits


def record_life_s(record: RequestRecord, now_s: float) -> int:
    """How long a record stays, from queue time `now_s` on."""
    return int(record.deadline_s - now_s) + keys.LOG_ENDED_TTL_S


def record_args(record: RequestRecord, now_s: float, limits: StorageLimits) -> tuple[bytes | str | int, ...]:
    """ARGV[17] to ARGV[22] of `submit.lua`."""
    payload = encode(record)
    quota = limits.max_record_bytes if record.stays else limits.max_plain_record_bytes
    return (
        payload,
        life_ms(record_life_s(record, now_s)),
        len(payload) + OVERHEAD_BYTES,
        "" if quota is None else quota,
        record.request_id,
        int(record.stays),
    )


class RedisRequests:
    """Implements the part of GatewayQueue that speaks of requests."""

    def __init__(self, link: RedisLink):
        self._link = link

    async def remember(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        payload = encode(record)
        life_s = record_life_s(record, await self._link.now_s())
        limits = replace(limits, max_bytes_per_tenant=limits.max_record_bytes)
        script_keys = [*record_keys(record.tenant), keys.request(record.request_id)]
        if idempotency is not None:
            script_keys.append(keys.idempotency(idempotency))
        before, _, behind = keys.request("-").partition("-")
        charged = charge_args(record.request_id, len(payload) + OVERHEAD_BYTES, life_s, limits)
        args = [*charged, payload, before, behind]
        _, holder = checked(await self._link.script_until_known("remember", script_keys, args))
        return holder.decode()

    async def recall(self, request_id: str) -> RequestRecord | None:
        key = keys.request(request_id)
        async with self._link.commands() as redis:
            payload = await redis.get(key)
        return None if payload is None else decode(RequestRecord, payload)

    async def forget(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        script_keys = [*record_keys(tenant), keys.request(request_id)]
        if idempotency is not None:
            script_keys.append(keys.idempotency(idempotency))
        log_key = "" if unless_there is None else keys.events(unless_there)
        await self._link.script("forget", script_keys, [request_id, unless_there or "", log_key])

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        async with self._link.commands() as redis, redis.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.xrevrange(keys.events(job_id), count=1)
            logs = await pipeline.execute()
        return [decode(Event, log[0][1].get(keys.PAYLOAD, b"")) if log else None for log in logs]

    async def watch(self, request_id: str, for_s: float) -> None:
        async with self._link.commands() as redis:
            await redis.set(keys.watched(request_id), b"1", px=max(1, int(for_s * 1000)))

    async def is_watched(self, request_id: str) -> bool:
        async with self._link.commands() as redis:
            return bool(await redis.exists(keys.watched(request_id)))

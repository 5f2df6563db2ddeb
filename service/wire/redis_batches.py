"""Files and batches on Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.wire import keys
from service.wire.batches import Batch, StoredFile, pack, unpack_batch, unpack_file
from service.wire.redis_link import RedisLink

CHUNK_BYTES = 256 << 10
"""A file is written and read in pieces, so that no single command keeps Redis from its other clients."""
CHUNKS_AT_ONCE = 16


class RedisBatches:
    """Implements BatchStore."""

    def __init__(self, link: RedisLink):
        self._link = link

    async def put_file(self, file: StoredFile, data: bytes) -> None:
        chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        key = keys.file_data(file.file_id)
        for start in range(0, len(chunks), CHUNKS_AT_ONCE):
            async with self._link.commands() as redis:
                await redis.rpush(key, *chunks[start : start + CHUNKS_AT_ONCE])
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.expire(key, keys.FILE_TTL_S)
            pipeline.set(keys.file(file.file_id), pack(file), ex=keys.FILE_TTL_S)
            pipeline.zadd(keys.files(file.tenant), {file.file_id: file.created_s})
            pipeline.expire(keys.files(file.tenant), keys.FILE_TTL_S)
            await pipeline.execute()

    async def file(self, file_id: str) -> StoredFile | None:
        key = keys.file(file_id)
        async with self._link.commands() as redis:
            packed = await redis.get(key)
        return None if packed is None else unpack_file(packed)

    async def file_data(self, file_id: str) -> bytes:
        key, parts, start = keys.file_data(file_id), [], 0
        while True:
            async with self._link.commands() as redis:
                chunks = await redis.lrange(key, start, start + CHUNKS_AT_ONCE - 1)
            if not chunks:
                return b"".join(parts)
            parts += chunks
            start += CHUNKS_AT_ONCE

    async def files(self, tenant: str) -> Sequence[StoredFile]:
        return [unpack_file(packed) for packed in await self._listed(keys.files(tenant), keys.file)]

    async def drop_file(self, file: StoredFile) -> None:
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.zrem(keys.files(file.tenant), file.file_id)
            pipeline.delete(keys.file(file.file_id))
            pipeline.delete(keys.file_data(file.file_id))
            await pipeline.execute()

    async def put_batch(self, batch: Batch) -> None:
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.set(keys.batch(batch.batch_id), pack(batch), ex=keys.FILE_TTL_S)
            pipeline.zadd(keys.batches(batch.tenant), {batch.batch_id: batch.created_s})
            pipeline.expire(keys.batches(batch.tenant), keys.FILE_TTL_S)
            if batch.is_open:
                pipeline.zadd(keys.OPEN_BATCHES, {batch.batch_id: batch.created_s})
            else:
                pipeline.zrem(keys.OPEN_BATCHES, batch.batch_id)
            await pipeline.execute()

    async def batch(self, batch_id: str) -> Batch | None:
        key = keys.batch(batch_id)
        async with self._link.commands() as redis:
            packed = await redis.get(key)
        return None if packed is None else unpack_batch(packed)

    async def batches(self, tenant: str) -> Sequence[Batch]:
        return [unpack_batch(packed) for packed in await self._listed(keys.batches(tenant), keys.batch)]

    async def open_batches(self) -> Sequence[str]:
        async with self._link.commands() as redis:
            return [found.decode() for found in await redis.zrange(keys.OPEN_BATCHES, 0, -1)]

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        key, life_ms = keys.batch_holder(batch_id), max(1, int(for_s * 1000))
        async with self._link.commands() as redis:
            if await redis.set(key, holder, px=life_ms, nx=True):
                return True
            if await redis.get(key) != holder.encode():
                return False
            # Between the two another may have taken it: then both work for a while, and of each line one answer stays.
            await redis.set(key, holder, px=life_ms)
        return True

    async def cancel_batch(self, batch_id: str) -> None:
        key = keys.batch_cancel(batch_id)
        async with self._link.commands() as redis:
            await redis.set(key, b"1", ex=keys.FILE_TTL_S)

    async def is_batch_cancelled(self, batch_id: str) -> bool:
        key = keys.batch_cancel(batch_id)
        async with self._link.commands() as redis:
            return bool(await redis.exists(key))

    async def put_line(self, batch_id: str, number: int, line: bytes) -> None:
        key = keys.batch_lines(batch_id)
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.hsetnx(key, str(number), line)
            pipeline.expire(key, keys.FILE_TTL_S)
            await pipeline.execute()

    async def lines(self, batch_id: str) -> Mapping[int, bytes]:
        key, found, cursor = keys.batch_lines(batch_id), {}, None
        while cursor != 0:
            async with self._link.commands() as redis:
                cursor, some = await redis.hscan(key, cursor or 0, count=512)
            found |= {int(number): line for number, line in some.items()}
        return found

    async def _listed(self, listing: str, key_of) -> list[bytes]:
        """The records that a listing names, the newest first; those whose time is over are taken from it."""
        async with self._link.commands() as redis:
            found = await redis.zrevrange(listing, 0, -1)
            packed = await redis.mget([key_of(each.decode()) for each in found]) if found else []
            gone = [each for each, record in zip(found, packed, strict=True) if record is None]
            if gone:
                await redis.zrem(listing, *gone)
        return [record for record in packed if record is not None]

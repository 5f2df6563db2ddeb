from __future__ import annotations

from collections.abc import Callable, Sequence

from service.queue import keys
from service.queue.records import (
    LINE_OVERHEAD_BYTES,
    OVERHEAD_BYTES,
    UNLIMITED,
    Batch,
    Move,
    MovedLines,
    OpenBatch,
    StorageLimits,
    StoredFile,
    pack,
    unpack_batch,
    unpack_file,
)
from service.queue.redis.link import RedisLink
from service.queue.redis.script_args import charge_args, checked, life_ms, stored_keys

BATCH_BYTES = 4096
"""Charged for a record's growth."""


class RedisBatchStore:
    """Implementation of BatchStore."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def reserve_file(self, file_id: str, tenant: str, num_bytes: int, limits: StorageLimits) -> None:
        charged = charge_args(file_id, num_bytes, keys.UPLOAD_TTL_S, limits)
        checked(await self._link.script("reserve", stored_keys(tenant), charged))

    async def append_file(
        self, file_id: str, tenant: str, data: bytes, limits: StorageLimits = UNLIMITED, *, is_reserved: bool = False
    ) -> int:
        charged = charge_args(file_id, 0 if is_reserved else len(data), keys.UPLOAD_TTL_S, limits)
        script_keys = [*stored_keys(tenant), keys.file_data(file_id)]
        return int(checked(await self._link.script("append", script_keys, [*charged, data]))[0])

    async def put_file(self, file: StoredFile) -> None:
        charged = charge_args(file.file_id, file.num_bytes + OVERHEAD_BYTES, keys.FILE_TTL_S, UNLIMITED)
        script_keys = [*stored_keys(file.tenant), keys.file(file.file_id), keys.file_data(file.file_id)]
        await self._link.script("store", script_keys, [*charged, pack(file), 0])
        await self._list(keys.files(file.tenant), file.file_id, file.created_s)

    async def get_file(self, file_id: str) -> StoredFile | None:
        key = keys.file(file_id)
        async with self._link.commands() as redis:
            packed = await redis.get(key)
        return None if packed is None else unpack_file(packed)

    async def file_pieces(self, file_id: str, first: int, count: int) -> Sequence[bytes]:
        key = keys.file_data(file_id)
        async with self._link.commands() as redis:
            pieces: list[bytes] = await redis.lrange(key, first, first + count - 1)
        return pieces

    async def list_files(self, tenant: str) -> Sequence[StoredFile]:
        return [unpack_file(packed) for packed in await self._listed(keys.files(tenant), keys.file, 0, -1)]

    async def drop_file(self, file_id: str, tenant: str) -> None:
        script_keys = [*stored_keys(tenant), keys.file(file_id), keys.file_data(file_id)]
        await self._link.script("drop", script_keys, [file_id])
        async with self._link.commands() as redis:
            await redis.zrem(keys.files(tenant), file_id)

    async def put_batch(self, batch: Batch, limits: StorageLimits = UNLIMITED) -> None:
        packed = pack(batch)
        charged = charge_args(batch.batch_id, len(packed) + BATCH_BYTES, keys.FILE_TTL_S, limits)
        script_keys = [*stored_keys(batch.tenant), keys.batch(batch.batch_id)]
        checked(await self._link.script("store", script_keys, [*charged, packed, 0]))
        await self._list(keys.batches(batch.tenant), batch.batch_id, batch.created_s)
        name = f"{batch.batch_id} {batch.tenant}"
        async with self._link.commands() as redis:
            if batch.is_open:
                await redis.zadd(keys.OPEN_BATCHES, {name: batch.created_s})
            else:
                await redis.zrem(keys.OPEN_BATCHES, name)
                for key in (keys.batch_marks(batch.batch_id), keys.batch_progress(batch.batch_id)):
                    await redis.expire(key, keys.BATCH_ENDED_TTL_S)

    async def get_batch(self, batch_id: str) -> Batch | None:
        key = keys.batch(batch_id)
        async with self._link.commands() as redis:
            packed = await redis.get(key)
        return None if packed is None else unpack_batch(packed)

    async def list_batches(self, tenant: str, after: str | None, count: int) -> Sequence[Batch]:
        listing, start = keys.batches(tenant), 0
        if after is not None:
            async with self._link.commands() as redis:
                rank = await redis.zrevrank(listing, after)
            if rank is None:
                return []
            start = rank + 1
        return [unpack_batch(packed) for packed in await self._listed(listing, keys.batch, start, start + count - 1)]

    async def open_batches(self) -> Sequence[OpenBatch]:
        async with self._link.commands() as redis:
            found = await redis.zrange(keys.OPEN_BATCHES, 0, -1)
        return [OpenBatch(*name.decode().split(" ", 1)) for name in found if b" " in name]

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        key, life_ms = keys.batch_holder(batch_id), max(1, int(for_s * 1000))
        async with self._link.commands() as redis:
            if await redis.set(key, holder, px=life_ms, nx=True):
                return True
            if await redis.get(key) != holder.encode():
                return False
            # If another gateway takes it in between, each line still keeps one answer.
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

    async def reserve_lines(self, batch: Batch, num_bytes: int, limits: StorageLimits) -> None:
        charged = charge_args(_lines_name(batch), num_bytes, keys.FILE_TTL_S, limits)
        checked(await self._link.script("reserve", stored_keys(batch.tenant), charged))

    async def put_line(
        self, batch: Batch, number: int, line: bytes, mark: bytes, limits: StorageLimits = UNLIMITED
    ) -> None:
        batch_id = batch.batch_id
        charged = charge_args(_lines_name(batch), len(line) + LINE_OVERHEAD_BYTES, keys.FILE_TTL_S, limits)
        line_keys = (keys.batch_lines(batch_id), keys.batch_marks(batch_id), keys.batch_progress(batch_id))
        answer = await self._link.script(
            "put_line", [*stored_keys(batch.tenant), *line_keys], [*charged, number, line, mark]
        )
        checked(answer)

    async def line_marks(self, batch_id: str) -> bytes:
        key = keys.batch_marks(batch_id)
        async with self._link.commands() as redis:
            return await redis.get(key) or b""

    async def line_sizes(self, batch_id: str, first: int, count: int) -> Sequence[int]:
        key = keys.batch_lines(batch_id)
        async with self._link.commands() as redis, redis.pipeline(transaction=False) as pipeline:
            for number in range(first, first + count):
                pipeline.hstrlen(key, str(number))
            sizes: list[int] = await pipeline.execute()
        return sizes

    async def lines(self, batch_id: str, first: int, count: int) -> Sequence[bytes | None]:
        key = keys.batch_lines(batch_id)
        async with self._link.commands() as redis:
            lines: list[bytes | None] = await redis.hmget(key, [str(number) for number in range(first, first + count)])
        return lines

    async def moved_lines(self, batch_id: str) -> MovedLines:
        key = keys.batch_progress(batch_id)
        async with self._link.commands() as redis:
            return MovedLines(*(int(found or 0) for found in await redis.hmget(key, "moved", "output", "error")))

    async def move_lines(self, batch: Batch, move: Move) -> int:
        names = (_lines_name(batch), move.output_file_id, move.error_file_id)
        first_unmoved: int = await self._link.script(
            "move_lines",
            [
                *stored_keys(batch.tenant),
                keys.batch_lines(batch.batch_id),
                keys.batch_progress(batch.batch_id),
                keys.file_data(move.output_file_id),
                keys.file_data(move.error_file_id),
            ],
            [*names, life_ms(keys.FILE_TTL_S), move.first, move.past, move.num_bytes, move.output, move.errors],
        )
        return first_unmoved

    async def drop_lines(self, batch: Batch) -> None:
        script_keys = [*stored_keys(batch.tenant), keys.batch_lines(batch.batch_id)]
        await self._link.script("drop", script_keys, [_lines_name(batch)])

    async def _list(self, listing: str, name: str, at_s: float) -> None:
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.zadd(listing, {name: at_s})
            pipeline.expire(listing, keys.FILE_TTL_S)
            await pipeline.execute()

    async def _listed(self, listing: str, key_of: Callable[[str], str], start: int, stop: int) -> list[bytes]:
        """Return records, newest first; remove expired ones."""
        async with self._link.commands() as redis:
            found = await redis.zrevrange(listing, start, stop)
            packed = await redis.mget([key_of(each.decode()) for each in found]) if found else []
            gone = [each for each, record in zip(found, packed, strict=True) if record is None]
            if gone:
                await redis.zrem(listing, *gone)
        return [record for record in packed if record is not None]


def _lines_name(batch: Batch) -> str:
    return f"{batch.batch_id}.lines"

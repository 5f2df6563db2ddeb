from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgpack
from redis.exceptions import ResponseError

from service.queue import keys
from service.queue.interface import IngressEntry, ReplyStream, Standing
from service.queue.redis.link import GroupMissing, RedisLink


class RedisIngress:
    """Implementation of IngressQueue. `name` is unique in the group."""

    def __init__(self, link: RedisLink, name: str) -> None:
        self._link = link
        self._name = name
        self._reader = GroupReader(link, keys.INGRESS_GROUP, name)
        self._producers: dict[str, str] = {}
        self._take_left_at_s = 0.0

    async def fetch_entries(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        streams = {keys.ingress(producer): producer for producer in producers}
        self._producers |= streams
        entries: list[GroupEntry] = []
        if time.monotonic() >= self._take_left_at_s:
            self._take_left_at_s = time.monotonic() + keys.INGRESS_KEEP_S
            entries = await self._reader.take_left(list(streams), max_entries, keys.INGRESS_LEFT_S)
        if not entries:
            entries = await self._reader.read(list(streams), max_entries, wait_s)
        self._reader.hold(entries)
        return [
            IngressEntry(streams[entry.stream], entry.entry_id, entry.payload, was_left=entry.attempt > 1)
            for entry in entries
        ]

    async def renew_entries(self) -> Sequence[IngressEntry]:
        lost = await self._reader.renew()
        return [IngressEntry(self._producers[stream], entry_id, b"") for stream, entry_id in lost]

    async def begin_replies(self, entry: IngressEntry, reply_id: str) -> ReplyStream:
        digest = sha256(entry.payload).hexdigest()
        args = [self._name, entry.entry_id, digest, keys.LOG_RUNNING_TTL_S]
        standing, *num_replies = await self._link.script("begin_replies", _reply_keys(entry, reply_id), args)
        if not any(num_replies):
            return ReplyStream(Standing(standing))
        async with self._link.commands() as redis:
            entries = await redis.xrange(keys.reply(entry.producer, reply_id))
        return ReplyStream(Standing.OURS, [fields.get(keys.PAYLOAD, b"") for _, fields in entries])

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        args = [self._name, entry.entry_id, number, payload, int(is_last), keys.REPLY_TTL_S, keys.LOG_RUNNING_TTL_S]
        return bool(await self._link.script("reply", _reply_keys(entry, reply_id), args))

    async def settle_entry(self, entry: IngressEntry) -> None:
        stream = keys.ingress(entry.producer)
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.xack(stream, keys.INGRESS_GROUP, entry.entry_id)
            pipeline.xdel(stream, entry.entry_id)
            await pipeline.execute()
        self.release_entry(entry)

    def release_entry(self, entry: IngressEntry) -> None:
        self._reader.release(keys.ingress(entry.producer), entry.entry_id)


def _reply_keys(entry: IngressEntry, reply_id: str) -> list[str]:
    names = (entry.producer, reply_id)
    return [keys.ingress(entry.producer), keys.reply(*names), keys.reply_of(*names)]


@dataclass(frozen=True)
class GroupEntry:
    """Pending entry; `attempt` counts deliveries from 1."""

    stream: str
    entry_id: str
    payload: bytes  # empty without a field `m`
    attempt: int


class GroupReader:
    """Consumer of a group. Pending entries that it does not hold are leftovers and come first."""

    def __init__(self, link: RedisLink, group: str, consumer: str) -> None:
        self._link = link
        self._group = group
        self._consumer = consumer
        self._held: set[tuple[str, str]] = set()
        self._may_have_left_overs = True

    async def read(self, streams: Sequence[str], max_entries: int, wait_s: float) -> list[GroupEntry]:
        """Return at most `max_entries` per stream, waiting `wait_s`; they count as leftovers until `hold`. Raises
        QueueUnavailable."""
        try:
            return await self._read(streams, max_entries, wait_s)
        except GroupMissing:
            for stream in streams:
                await self._link.make_group(stream, self._group)
            return await self._read(streams, max_entries, wait_s)

    def hold(self, entries: Iterable[GroupEntry]) -> None:
        self._held.update((entry.stream, entry.entry_id) for entry in entries)
        self._may_have_left_overs = False

    def release(self, stream: str, entry_id: str) -> None:
        self._held.discard((stream, entry_id))

    async def renew(self) -> list[tuple[str, str]]:
        """Renew held entries; return the (stream, entry id) others hold."""
        held = sorted(self._held)
        if not held:
            return []
        streams = {stream: number for number, stream in enumerate(dict.fromkeys(stream for stream, _ in held), 10)}
        items = [word for stream, entry_id in held for word in (streams[stream], entry_id)]
        args = [self._consumer, msgpack.packb(items)]
        lost = [held[number - 1] for number in await self._link.script("hold", list(streams), args)]
        self._held.difference_update(lost)
        return lost

    async def take_left(self, streams: Sequence[str], max_entries: int, left_s: float) -> list[GroupEntry]:
        """Claim entries not renewed for `left_s`."""
        taken: list[GroupEntry] = []
        for stream in streams:
            left_ms = int(left_s * 1000)
            async with self._link.commands() as redis:
                try:
                    pending = await redis.xpending_range(stream, self._group, "-", "+", max_entries, idle=left_ms)
                except ResponseError as error:
                    if str(error).startswith("NOGROUP"):
                        continue
                    raise
                ids = [entry["message_id"] for entry in pending]
                left = [entry_id for entry_id in ids if (stream, entry_id.decode()) not in self._held]
                claimed = await redis.xclaim(stream, self._group, self._consumer, left_ms, left) if left else []
            for entry_id, fields in claimed:
                if entry_id is not None and fields is not None:
                    taken.append(GroupEntry(stream, entry_id.decode(), fields.get(keys.PAYLOAD, b""), 2))
        return taken

    async def _read(self, streams: Sequence[str], max_entries: int, wait_s: float) -> list[GroupEntry]:
        if self._may_have_left_overs:
            left_over = [entry for stream in streams for entry in await self._left_over(stream, max_entries)]
            if left_over:
                return left_over
        self._may_have_left_overs = True
        answer = await self._link.block(
            lambda redis, block_ms: redis.xreadgroup(
                self._group, self._consumer, dict.fromkeys(streams, ">"), max_entries, block_ms
            ),
            wait_s,
        )
        if not answer:
            self._may_have_left_overs = False
        return [
            GroupEntry(stream.decode(), entry_id.decode(), fields.get(keys.PAYLOAD, b""), 1)
            for stream, entries in answer
            for entry_id, fields in entries
        ]

    async def _left_over(self, stream: str, max_entries: int) -> list[GroupEntry]:
        count = len(self._held) + max_entries
        pending = await self._link.block(
            lambda redis, _: redis.xpending_range(stream, self._group, "-", "+", count, self._consumer), 0.0
        )
        deliveries = {
            entry["message_id"]: entry["times_delivered"]
            for entry in pending
            if (stream, entry["message_id"].decode()) not in self._held
        }
        if not deliveries:
            return []
        async with self._link.commands() as redis:
            claimed = await redis.xclaim(stream, self._group, self._consumer, 0, list(deliveries))
            there = {entry_id: fields for entry_id, fields in claimed if entry_id is not None and fields is not None}
            gone = deliveries.keys() - there.keys()
            if gone:
                await redis.xack(stream, self._group, *gone)
        return [
            GroupEntry(stream, entry_id.decode(), fields.get(keys.PAYLOAD, b""), deliveries[entry_id] + 1)
            for entry_id, fields in there.items()
        ]

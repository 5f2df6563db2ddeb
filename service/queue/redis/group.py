"""Reading streams as one consumer of a group, without losing what was given to us while we looked away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgpack
from redis.exceptions import ResponseError

from service.queue import keys
from service.queue.redis.link import GroupMissing, RedisLink


@dataclass(frozen=True)
class GroupEntry:
    """An entry that is pending for us now. `attempt` counts its deliveries from 1."""

    stream: str
    entry_id: str
    payload: bytes  # empty if the entry has no such field
    attempt: int


class GroupReader:
    """A consumer. Entries that Redis holds pending for it and that nobody here holds are left over from a read that was
    cut off, or from the life before; they come first."""

    def __init__(self, link: RedisLink, group: str, consumer: str):
        self._link = link
        self._group = group
        self._consumer = consumer
        self._held: set[tuple[str, str]] = set()
        self._may_have_left_overs = True

    async def read(self, streams: Sequence[str], max_entries: int, wait_s: float) -> list[GroupEntry]:
        """At most max_entries for each stream; waits up to wait_s for the first. The caller says `hold` once they are
        in its hands; until then they count as left over. Raises QueueUnavailable."""
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
        """The entry is settled, or not worked on here any more."""
        self._held.discard((stream, entry_id))

    async def keep(self) -> list[tuple[str, str]]:
        """Say that what is held is still worked on. Returns (stream, entry) of what others hold by now."""
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
        """Entries of consumers that have not said for so long that they work on them."""
        taken = []
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

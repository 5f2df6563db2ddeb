"""Reading streams as one consumer of a group, without losing what was given to us while we looked away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.wire import keys
from service.wire.redis_link import GroupMissing, RedisLink

PAYLOAD = keys.PAYLOAD_FIELD.encode()


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
        in its hands; until then they count as left over. Raises BrokerUnavailable."""
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
        """The entry is settled."""
        self._held.discard((stream, entry_id))

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
            GroupEntry(stream.decode(), entry_id.decode(), fields.get(PAYLOAD, b""), 1)
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
            GroupEntry(stream, entry_id.decode(), fields.get(PAYLOAD, b""), deliveries[entry_id] + 1)
            for entry_id, fields in there.items()
        ]

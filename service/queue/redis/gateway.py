"""The doors' half of the Redis queue."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

from service.observability.logs import fields
from service.queue import keys
from service.queue.codec import WireError, decode, encode
from service.queue.interface import (
    QUEUE_LANES,
    UNBOUNDED,
    Backlog,
    Bounds,
    IngressEntry,
    Lane,
    QueueFull,
    QueueState,
    ReplyStream,
    Standing,
)
from service.queue.job_cost import LANES
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.redis.feed import FeedReader
from service.queue.redis.group import GroupReader
from service.queue.redis.job_state import bound_args, deadline_arg, new_state
from service.queue.redis.ledger import record_keys
from service.queue.redis.link import RedisLink, order
from service.queue.redis.requests import record_args
from service.queue.storage import UNLIMITED, StorageFull, StorageLimits

log = logging.getLogger("quire.redis")


class RedisGatewayQueue:
    """Implements GatewayQueue. `name` tells this process from the others in the consumer groups."""

    def __init__(self, link: RedisLink, name: str):
        self._link = link
        self._name = name
        self._feeds = FeedReader(link, self.submit)
        self._ingress = GroupReader(link, keys.INGRESS_GROUP, name)
        self._producers: dict[str, str] = {}  # by their streams
        self._looks_for_left_at_s = 0.0

    async def submit(
        self,
        job: Job,
        bounds: Bounds = UNBOUNDED,
        record: RequestRecord | None = None,
        limits: StorageLimits = UNLIMITED,
    ) -> None:
        payload = encode(job)
        script_keys: list[str] = [keys.cancel(job.job_id)]
        args = [secrets.token_hex(8), job.job_id, payload, new_state(job), deadline_arg(job), *bound_args(bounds)]
        if record is not None:
            script_keys += (keys.request(record.request_id), *record_keys(record.tenant))
            args += record_args(record, await self._link.now_s(), limits)
        self._feeds.submitting(job)
        answer = await self._link.script_until_known("submit", script_keys, args)
        if answer[0] < 0:
            self._feeds.refused(job.job_id)
            if answer[0] == -3:
                raise StorageFull(of_tenant=True, num_bytes=answer[1], max_bytes=answer[2])
            raise QueueFull(of_tenant=answer[0] == -2, num_jobs=answer[1], num_tokens=answer[2])
        if answer[0] == 1 or answer[1].decode() == keys.feed(job.feed):
            self._feeds.submitted(job.job_id)
        else:
            self._feeds.found(job.job_id)

    async def backlog(self, tenant: str) -> Backlog:
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            for queue in (keys.RETURNED, keys.WAITING, keys.SUSPECTS):
                pipeline.xlen(queue)
            pipeline.hmget(keys.WAITING_TOKENS, "", tenant)
            *lengths, tokens = await pipeline.execute()
        return Backlog(sum(lengths), *(int(count or 0) for count in tokens))

    async def place(self, job_id: str) -> int | None:
        return await self._link.script("place", [], [job_id])

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        return self._feeds.follow(job_id, after)

    async def cancel(self, cancel: Cancel) -> None:
        branch = "" if cancel.branch is None else cancel.branch
        await self._link.script(
            "cancel",
            [keys.cancel(cancel.job_id), keys.events(cancel.job_id), keys.CANCELS],
            [
                cancel.job_id,
                cancel.reason.value,
                branch,
                keys.TOMBSTONE_TTL_S,
                keys.CANCELS_MAX_ENTRIES,
                encode(cancel),
            ],
        )

    async def workers(self) -> Sequence[WorkerCard]:
        fresh_since_s = await self._link.now_s() - keys.CARD_TTL_S
        async with self._link.commands() as redis:
            worker_ids = await redis.zrangebyscore(keys.WORKERS, fresh_since_s, "+inf")
            if not worker_ids:
                return []
            cards = await redis.mget([keys.worker(worker_id.decode()) for worker_id in worker_ids])
        return [card for payload in cards if payload is not None and (card := _card(payload)) is not None]

    async def look(self) -> None:
        async with self._link.commands() as redis:
            await redis.set(keys.LOOKED_AT, 1, ex=keys.LOOKED_AT_TTL_S)

    async def queue_state(self) -> QueueState:
        now_s = await self._link.now_s()
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            for lane in LANES:
                pipeline.zcard(keys.waiting_since(lane))
                pipeline.zrange(keys.waiting_since(lane), 0, 0, withscores=True)
            for queue in (keys.RETURNED, keys.SUSPECTS):
                pipeline.xlen(queue)
                pipeline.xrange(queue, count=1)
            pipeline.zrangebyscore(keys.LEASES, now_s, "+inf")
            pipeline.time()
            *found, leases, (seconds, microseconds) = await pipeline.execute()
        lanes = zip(QUEUE_LANES, found[::2], found[1::2], strict=True)
        ahead_s = seconds + microseconds / 1e6 - now_s  # of Redis' clock, which names entries
        return QueueState({lane: Lane(count, _since_s(first, ahead_s)) for lane, count, first in lanes}, len(leases))

    async def now_s(self) -> float:
        return await self._link.now_s()

    async def fetch_ingress(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        streams = {keys.ingress(producer): producer for producer in producers}
        self._producers |= streams
        entries = []
        if time.monotonic() >= self._looks_for_left_at_s:
            self._looks_for_left_at_s = time.monotonic() + keys.INGRESS_KEEP_S
            entries = await self._ingress.take_left(list(streams), max_entries, keys.INGRESS_LEFT_S)
        if not entries:
            entries = await self._ingress.read(list(streams), max_entries, wait_s)
        self._ingress.hold(entries)
        return [
            IngressEntry(streams[entry.stream], entry.entry_id, entry.payload, was_left=entry.attempt > 1)
            for entry in entries
        ]

    async def keep_ingress(self) -> Sequence[IngressEntry]:
        lost = await self._ingress.keep()
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

    async def settle_ingress(self, entry: IngressEntry) -> None:
        stream = keys.ingress(entry.producer)
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.xack(stream, keys.INGRESS_GROUP, entry.entry_id)
            pipeline.xdel(stream, entry.entry_id)
            await pipeline.execute()
        self.leave_ingress(entry)

    def leave_ingress(self, entry: IngressEntry) -> None:
        self._ingress.release(keys.ingress(entry.producer), entry.entry_id)

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        args = [self._name, entry.entry_id, number, payload, int(is_last), keys.REPLY_TTL_S, keys.LOG_RUNNING_TTL_S]
        return bool(await self._link.script("reply", _reply_keys(entry, reply_id), args))

    async def close_readers(self) -> None:
        """Ends the readers; who follows a job then gets QueueUnavailable."""
        await self._feeds.close()


def _reply_keys(entry: IngressEntry, reply_id: str) -> list[str]:
    names = (entry.producer, reply_id)
    return [keys.ingress(entry.producer), keys.reply(*names), keys.reply_of(*names)]


def _since_s(first: Sequence[tuple[bytes, Any]], ahead_s: float) -> float | None:
    """When the first job of a lane, as Redis lists it, began to wait: its score, or the time in its entry's id, which
    is `ahead_s` ahead of the queue's."""
    if not first:
        return None
    entry, score = first[0]
    return score if isinstance(score, float) else order(entry.decode())[0] / 1e3 - ahead_s


def _card(payload: bytes) -> WorkerCard | None:
    try:
        return decode(WorkerCard, payload)
    except WireError as error:
        log.warning("unreadable worker card %s", fields(error=error))
        return None

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from service.queue import keys
from service.queue.codec import decode, encode
from service.queue.interface import QUEUE_LANES, UNBOUNDED, Backlog, Bounds, EventStream, Lane, QueueFull, QueueState
from service.queue.job_cost import LANES
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.prefixes import prefix_digests
from service.queue.records import UNLIMITED, StorageFull, StorageLimits
from service.queue.redis.batches import RedisBatchStore
from service.queue.redis.feed import FeedReader
from service.queue.redis.ingress import RedisIngress
from service.queue.redis.link import RedisLink, order
from service.queue.redis.script_args import ScriptArg, bound_args, deadline_arg, new_state, record_args, record_keys
from service.queue.redis.stores import RedisAdapterStore, RedisRequestStore, RedisResponseStore
from service.queue.redis.worker_cards import WorkerCards


class RedisGatewayQueue:
    """Implementation of GatewayQueue. `name` is unique among live gateways."""

    def __init__(self, link: RedisLink, name: str) -> None:
        self._link = link
        self._feeds = FeedReader(link, self.submit)
        self._cards = WorkerCards(link)
        self.batches = RedisBatchStore(link)
        self.responses = RedisResponseStore(link)
        self.adapters = RedisAdapterStore(link)
        self.requests = RedisRequestStore(link)
        self.ingress = RedisIngress(link, name)

    async def submit(
        self,
        job: Job,
        bounds: Bounds = UNBOUNDED,
        record: RequestRecord | None = None,
        limits: StorageLimits = UNLIMITED,
    ) -> None:
        payload = encode(job)
        script_keys: list[str] = [keys.cancel(job.job_id)]
        args: list[ScriptArg] = [
            secrets.token_hex(8),
            job.job_id,
            payload,
            new_state(job, prefixes=prefix_digests(job)),
            deadline_arg(job),
            *bound_args(bounds),
        ]
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

    async def queue_position(self, job_id: str) -> int | None:
        position: int | None = await self._link.script("place", [], [job_id])
        return position

    def follow(self, job_id: str, after: int = 0) -> EventStream:
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
        return await self._cards.fresh()

    async def request_block_maps(self) -> None:
        await self._cards.request_block_maps()

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
        ahead_s = seconds + microseconds / 1e6 - now_s  # Redis' clock, in entry ids
        return QueueState({lane: Lane(count, _since_s(first, ahead_s)) for lane, count, first in lanes}, len(leases))

    async def now_s(self) -> float:
        return await self._link.now_s()

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        async with self._link.commands() as redis, redis.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.xrevrange(keys.events(job_id), count=1)
            logs = await pipeline.execute()
        return [decode(Event, log[0][1].get(keys.PAYLOAD, b"")) if log else None for log in logs]

    async def close(self) -> None:
        """Close the queue; iterators of `follow` then raise QueueUnavailable."""
        await self._feeds.close()
        await self._link.close()


def _since_s(first: Sequence[tuple[bytes, Any]], ahead_s: float) -> float | None:
    """Return the first entry's score, or its id's time, which is `ahead_s` ahead of queue time."""
    if not first:
        return None
    entry, score = first[0]
    return score if isinstance(score, float) else order(entry.decode())[0] / 1e3 - ahead_s

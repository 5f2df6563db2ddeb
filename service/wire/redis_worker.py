"""The workers' half of the Redis broker."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from service.errors import EndReason
from service.logs import fields
from service.wire import keys
from service.wire.broker import Claim
from service.wire.codec import WireError, decode, encode
from service.wire.messages import Cancel, Event, Job, Usage, WorkerCard
from service.wire.redis_group import PAYLOAD, GroupEntry, GroupReader
from service.wire.redis_link import RedisLink

log = logging.getLogger("quire.redis")

MAX_CANCELS_READ = 1024
MAX_CANCELS_KEPT = 8192


@dataclass(frozen=True)
class _Held:
    """Where a claimed job's events go."""

    entry_id: str
    feed: str
    log: str
    tombstone: str


class RedisWorker:
    """Implements WorkerBroker. `name` tells this process from the others in the consumer group."""

    def __init__(self, link: RedisLink, name: str, cancels_from: str):
        self._link = link
        self._jobs = GroupReader(link, keys.JOBS_GROUP, name)
        self._held: dict[str, _Held] = {}
        self._cancels_from = cancels_from
        self._cancels: OrderedDict[str, EndReason] = OrderedDict()  # heard lately

    async def fetch(self, max_jobs: int, wait_s: float) -> Sequence[Claim]:
        give_up_s = time.monotonic() + wait_s
        while True:
            entries = await self._jobs.read([keys.JOBS], max_jobs, give_up_s - time.monotonic())
            claims = await self._admit(entries)
            claimed = {claim.entry_id for claim in claims}
            self._jobs.hold(entry for entry in entries if entry.entry_id in claimed)
            if claims or time.monotonic() >= give_up_s:
                return claims

    async def publish(self, events: Sequence[Event]) -> None:
        known = [(event, self._held[event.job_id]) for event in events if event.job_id in self._held]
        if len(known) < len(events):
            strangers = {event.job_id for event in events} - self._held.keys()
            log.warning("events of jobs that are not ours were dropped %s", fields(num_jobs=len(strangers)))
        if not known:
            return
        numbers = {feed: number for number, feed in enumerate(dict.fromkeys(held.feed for _, held in known), 1)}
        items: list[int | str | bytes] = []
        for event, held in known:
            reason = "" if event.end is None else event.end.value
            items += (numbers[held.feed], event.number, encode(event), reason, held.entry_id)
        logs = [held.log for _, held in known]
        tombstones = [held.tombstone for event, held in known if event.end is not None]
        script_keys = [keys.JOBS, *numbers, *logs, *tombstones]
        lives = (keys.FEED_MAX_ENTRIES, keys.FEED_TTL_S, keys.LOG_RUNNING_TTL_S, keys.LOG_ENDED_TTL_S)
        args = [len(numbers), *lives, msgpack.packb(items, use_bin_type=False)]
        await self._link.script("publish", script_keys, args)
        for event, held in known:
            if event.end is not None:
                self._held.pop(event.job_id, None)
                self._jobs.release(keys.JOBS, held.entry_id)
                self._cancels.pop(event.job_id, None)

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        answer = await self._link.block(
            lambda redis, block_ms: redis.xread({keys.CANCELS: self._cancels_from}, MAX_CANCELS_READ, block_ms), wait_s
        )
        cancels = []
        for entry_id, entry in (entry for _, entries in answer for entry in entries):
            self._cancels_from = entry_id.decode()
            try:
                cancels.append(decode(Cancel, entry.get(PAYLOAD, b"")))
            except WireError as error:
                log.error("unreadable cancel %s", fields(entry=entry_id.decode(), error=error))
        for cancel in cancels:
            self._cancels[cancel.job_id] = cancel.reason
        while len(self._cancels) > MAX_CANCELS_KEPT:
            self._cancels.popitem(last=False)
        return cancels

    async def announce(self, card: WorkerCard) -> bool:
        now_s = await self._link.now_s()
        payload = encode(dataclasses.replace(card, beat_at_s=now_s))
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.set(keys.worker(card.worker_id), payload, ex=keys.CARD_TTL_S)
            pipeline.zadd(keys.WORKERS, {card.worker_id: now_s})
            pipeline.zremrangebyscore(keys.WORKERS, "-inf", now_s - keys.CARD_TTL_S)
            pipeline.mget([keys.LOOKED_AT])
            *_, (looked_at,) = await pipeline.execute()
        return looked_at is not None

    async def retire(self, worker_id: str) -> None:
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(keys.worker(worker_id))
            pipeline.zrem(keys.WORKERS, worker_id)
            await pipeline.execute()

    async def _admit(self, entries: Sequence[GroupEntry]) -> list[Claim]:
        """Claims of the jobs that are still wanted; the others are ended here."""
        claims = await self._readable(entries)
        if not claims:
            return []
        async with self._link.commands() as redis:
            tombstones = await redis.mget([keys.cancel(claim.job.job_id) for claim in claims])
        now_s = await self._link.now_s()
        endings = {}
        for claim, tombstone in zip(claims, tombstones, strict=True):
            if tombstone is not None:
                endings[claim.job.job_id] = _reason(tombstone)
            elif claim.job.deadline_s is not None and claim.job.deadline_s <= now_s:
                endings[claim.job.job_id] = EndReason.DEADLINE
        while True:
            await self._end_all([claim for claim in claims if claim.job.job_id in endings], endings)
            claims = [claim for claim in claims if claim.job.job_id not in endings]
            # A cancel heard since we looked for tombstones reached its reader before the job did.
            heard = {claim.job.job_id: self._cancels.get(claim.job.job_id) for claim in claims}
            endings = {job_id: reason for job_id, reason in heard.items() if reason is not None}
            if not endings:
                return claims

    async def _readable(self, entries: Sequence[GroupEntry]) -> list[Claim]:
        claims = []
        for entry in entries:
            try:
                job = decode(Job, entry.payload)
                held = _Held(entry.entry_id, keys.feed(job.feed), keys.events(job.job_id), keys.cancel(job.job_id))
            except ValueError as error:
                log.error("unreadable job dropped %s", fields(entry=entry.entry_id, error=error))
                await self._drop(entry)
                continue
            if job.job_id in self._held and self._held[job.job_id].entry_id != entry.entry_id:
                log.warning("a job was queued twice %s", fields(job=job.job_id))
                await self._drop(entry)
                continue
            self._held[job.job_id] = held
            claims.append(Claim(job, entry.attempt, entry.entry_id))
        return claims

    async def _drop(self, entry: GroupEntry) -> None:
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.xack(entry.stream, keys.JOBS_GROUP, entry.entry_id)
            pipeline.xdel(entry.stream, entry.entry_id)
            await pipeline.execute()

    async def _end_all(self, claims: Sequence[Claim], endings: dict[str, EndReason]) -> None:
        if not claims:
            return
        usage = Usage(prompt_tokens=0, completion_tokens=0)
        async with self._link.commands() as redis, redis.pipeline(transaction=False) as pipeline:
            for claim in claims:
                pipeline.xrevrange(keys.events(claim.job.job_id), count=1)
            logs = await pipeline.execute()
        ends = []
        for claim, last in zip(claims, logs, strict=True):
            number = int(last[0][0].partition(b"-")[0]) if last else 0
            ends.append(Event(job_id=claim.job.job_id, number=number + 1, end=endings[claim.job.job_id], usage=usage))
        await self.publish(ends)


def _reason(tombstone: bytes) -> EndReason:
    try:
        return EndReason(tombstone.decode())
    except ValueError:  # a door that is newer than we are
        return EndReason.CANCELLED

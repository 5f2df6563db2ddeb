from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from service.observability.logs import fields
from service.queue import keys
from service.queue.codec import WireError, decode, encode
from service.queue.messages import WorkerCard
from service.queue.redis.link import RedisLink

log = logging.getLogger("quire.redis")


class WorkerCards:
    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def fresh(self) -> Sequence[WorkerCard]:
        """Return cards at most CARD_TTL_S old."""
        fresh_since_s = await self._link.now_s() - keys.CARD_TTL_S
        async with self._link.commands() as redis:
            worker_ids = await redis.zrangebyscore(keys.WORKERS, fresh_since_s, "+inf")
            if not worker_ids:
                return []
            cards = await redis.mget([keys.worker(worker_id.decode()) for worker_id in worker_ids])
        return [card for payload in cards if payload is not None and (card := _card(payload)) is not None]

    async def put(self, card: WorkerCard) -> bool:
        """Write a card with the current time; return whether block maps are requested."""
        now_s = await self._link.now_s()
        payload = encode(dataclasses.replace(card, beat_at_s=now_s))
        async with self._link.commands() as redis, redis.pipeline(transaction=True) as pipeline:
            pipeline.set(keys.worker(card.worker_id), payload, ex=keys.CARD_TTL_S)
            pipeline.zadd(keys.WORKERS, {card.worker_id: now_s})
            pipeline.zremrangebyscore(keys.WORKERS, "-inf", now_s - keys.CARD_TTL_S)
            pipeline.mget([keys.LOOKED_AT])
            *_, (looked_at,) = await pipeline.execute()
        return looked_at is not None

    async def request_block_maps(self) -> None:
        async with self._link.commands() as redis:
            await redis.set(keys.LOOKED_AT, 1, ex=keys.LOOKED_AT_TTL_S)


def _card(payload: bytes) -> WorkerCard | None:
    try:
        return decode(WorkerCard, payload)
    except WireError as error:
        log.warning("unreadable worker card %s", fields(error=error))
        return None

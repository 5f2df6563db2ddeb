"""Other workers on the same Redis, by their cards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from service.errors import StartupError
from service.observability.logs import fields
from service.queue.interface import QueueUnavailable, WorkerQueue
from service.queue.keys import CARD_LATE_S
from service.queue.messages import WorkerCard

log = logging.getLogger("quire.worker")

LOOK_S = 0.5

COMPARED = ("weight_format", "kv_cache_dtype")
"""Card fields that affect which tokens a request gets."""


async def ready_workers(queue: WorkerQueue) -> Sequence[WorkerCard]:
    """Return the cards of ready workers. Raises QueueUnavailable."""
    now_s = await queue.now_s()
    return [card for card in await queue.workers() if card.ready and now_s - card.beat_at_s < CARD_LATE_S]


async def has_replacement(queue: WorkerQueue, ours: WorkerCard) -> bool:
    """Return True if another worker with our model is ready. Raises QueueUnavailable."""
    workers = await ready_workers(queue)
    return any(card.model == ours.model for card in workers if card.worker_id != ours.worker_id)


async def require_one_model(queue: WorkerQueue, model: str) -> None:
    """Wait until no ready worker serves another model, as each would refuse the other's jobs. Raises StartupError."""
    give_up_s = time.monotonic() + CARD_LATE_S + LOOK_S  # a dead worker's card is late by then
    try:
        while others := [card for card in await ready_workers(queue) if card.model != model]:
            if time.monotonic() > give_up_s:
                raise StartupError(
                    f"--served-model-name: {model!r}, but worker {others[0].worker_id} of this Redis serves "
                    f"{others[0].model!r} (one Redis serves one model)"
                )
            await asyncio.sleep(LOOK_S)
    except QueueUnavailable as error:
        raise StartupError(f"--redis-url: {error}") from None


async def log_differences(queue: WorkerQueue, ours: WorkerCard) -> None:
    """Log workers on which a request would continue with other tokens. Raises QueueUnavailable."""
    for card in await ready_workers(queue):
        values = {name: getattr(card, name) for name in COMPARED if getattr(card, name) != getattr(ours, name)}
        if values and card.worker_id != ours.worker_id:
            own = {f"own_{name}": getattr(ours, name) for name in values}
            log.warning(
                "another worker differs: a request that moves between them changes %s",
                fields(worker=card.worker_id, **values, **own),
            )

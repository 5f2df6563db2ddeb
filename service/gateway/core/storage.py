"""What tenants may store here, and how a store that refuses is answered."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from service.config.settings import Settings
from service.errors import STORAGE_FULL, STORAGE_QUOTA_EXCEEDED, RequestError
from service.gateway.core.admission import unavailable
from service.queue.interface import QueueUnavailable
from service.queue.storage import StorageFull, StorageLimits

Answer = TypeVar("Answer")

RETRY_AFTER_S = 60
"""Nothing that is stored goes away by itself soon."""


def storage_limits(settings: Settings) -> StorageLimits:
    return StorageLimits(
        max_bytes_per_tenant=settings.max_stored_bytes_per_tenant, queue_share=settings.queue_memory_share
    )


def storage_refusal(full: StorageFull) -> RequestError:
    if full.of_tenant:
        message = (
            f"Storage quota: {full.num_bytes} of {full.max_bytes} bytes are taken by your files, batches and stored "
            "responses or by records of your requests, and this would exceed them (delete files or responses, send "
            "'store': false, or wait until they expire)."
        )
        return RequestError(429, message, "rate_limit_error", code=STORAGE_QUOTA_EXCEEDED, retry_after_s=RETRY_AFTER_S)
    message = "The memory for stored data is full; the rest is the queue's own (try again later, or store less)."
    return RequestError(503, message, "server_error", code=STORAGE_FULL, retry_after_s=RETRY_AFTER_S)


async def stored(asked: Awaitable[Answer]) -> Answer:
    """What a store answers. Raises RequestError, 429 or 503, where it refuses or is not there."""
    try:
        return await asked
    except QueueUnavailable:
        raise unavailable() from None
    except StorageFull as full:
        raise storage_refusal(full) from None

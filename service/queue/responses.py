"""Responses as the queue keeps them: the conversation that a later one goes on with, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from service.queue.storage import UNLIMITED, StorageLimits

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """Items are OpenAI's objects, each under its id."""

    response_id: str
    tenant: str
    created_s: float  # queue time, Unix seconds
    answer: Json  # the response, as it is while it has no end, or as it ended
    context: list[Json] = field(default_factory=list)  # items of the responses that it goes on with, the oldest first
    input: list[Json] = field(default_factory=list)  # its own items

    @property
    def is_settled(self) -> bool:
        return self.answer["status"] not in ("queued", "in_progress")


def pack_response(record: StoredResponse) -> bytes:
    return msgspec.json.encode(record)


def unpack_response(packed: bytes) -> StoredResponse:
    return msgspec.json.decode(packed, type=StoredResponse)


class ResponseStore(Protocol):
    """Part of GatewayQueue. Ids that no key may hold raise ValueError."""

    async def put_response(self, record: StoredResponse, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        """Keep the record for `for_s` from now. Raises StorageFull."""

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        """The same for one that has its answer now, unless it was dropped meanwhile. Never refused: the answer is
        paid for in tokens."""

    async def response(self, response_id: str) -> StoredResponse | None: ...

    async def drop_response(self, record: StoredResponse) -> None: ...

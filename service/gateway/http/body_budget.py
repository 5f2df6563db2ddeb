"""Limits the memory for request bodies, in total and per client."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from service.errors import RequestError

SMALL_BYTES = 64 << 10
LARGE_SHARE = 0.75
"""Share for large bodies, so that uploads leave room for chats."""
CLIENT_SHARE = 0.5
WAIT_S = 2.0
RETRY_AFTER_S = 2


@dataclass(eq=False)
class _Waiting:
    client: str
    num_bytes: int
    is_large: bool
    granted: asyncio.Future[None]


class BodyBudget:
    """Grants bytes to requests. A request waits for bytes at most WAIT_S."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = self._held_large = 0
        self._by_client: Counter[str] = Counter()
        self._waiting: deque[_Waiting] = deque()

    @property
    def num_bytes(self) -> int:
        return self._held

    def open_reservation(self, client: str) -> BodyReservation:
        return BodyReservation(self, client)

    async def reserve(self, client: str, num_bytes: int, *, is_large: bool) -> None:
        """Reserve bytes. Raises RequestError: 429 if the client's share is used up, 503 if the budget is."""
        if not num_bytes:
            return
        if self._has_room(client, num_bytes, is_large):
            self._grant(client, num_bytes, is_large)
            return
        waiting = _Waiting(client, num_bytes, is_large, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(WAIT_S):
                await waiting.granted
        except TimeoutError:
            raise self._refusal(client, num_bytes) from None
        except asyncio.CancelledError:
            if waiting.granted.done() and not waiting.granted.cancelled():
                self.release(client, num_bytes, is_large=is_large)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def release(self, client: str, num_bytes: int, *, is_large: bool) -> None:
        if not num_bytes:
            return
        self._held -= num_bytes
        self._held_large -= num_bytes if is_large else 0
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]
        for waiting in list(self._waiting):
            if self._has_room(waiting.client, waiting.num_bytes, waiting.is_large):
                self._waiting.remove(waiting)
                if not waiting.granted.done():
                    self._grant(waiting.client, waiting.num_bytes, waiting.is_large)
                    waiting.granted.set_result(None)

    def _has_room(self, client: str, num_bytes: int, is_large: bool) -> bool:
        if self._by_client[client] + num_bytes > self._max_bytes * CLIENT_SHARE:
            return False
        if is_large and self._held_large + num_bytes > self._max_bytes * LARGE_SHARE:
            return False
        return self._held + num_bytes <= self._max_bytes

    def _grant(self, client: str, num_bytes: int, is_large: bool) -> None:
        self._held += num_bytes
        self._held_large += num_bytes if is_large else 0
        self._by_client[client] += num_bytes

    def _refusal(self, client: str, num_bytes: int) -> RequestError:
        if self._by_client[client] + num_bytes > self._max_bytes * CLIENT_SHARE:
            message = "Too many bytes of your requests are on their way at once (send fewer or smaller ones at a time)."
            return RequestError(
                429, message, "rate_limit_error", code="too_many_body_bytes", retry_after_s=RETRY_AFTER_S
            )
        message = "The server holds too many bytes of requests now."
        return RequestError(503, message, "server_error", code="too_many_body_bytes", retry_after_s=RETRY_AFTER_S)


class BodyReservation:
    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._small = self._large = 0

    @property
    def num_bytes(self) -> int:
        return self._small + self._large

    async def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more. Raises RequestError (429, 503)."""
        is_large = self.num_bytes + num_bytes > SMALL_BYTES
        await self._budget.reserve(self._client, num_bytes, is_large=is_large)
        if is_large:
            self._large += num_bytes
        else:
            self._small += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Release all but `num_bytes`."""
        over = max(0, self.num_bytes - num_bytes)
        large = min(over, self._large)
        small = over - large
        self._large -= large
        self._small -= small
        self._budget.release(self._client, large, is_large=True)
        self._budget.release(self._client, small, is_large=False)

    def close(self) -> None:
        self.shrink(0)

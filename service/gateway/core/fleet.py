"""A cached view of workers and queue, refreshed at most four times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.queue.interface import GatewayQueue, QueueState
from service.queue.keys import CARD_LATE_S
from service.queue.messages import WorkerCard

MAX_AGE_S = 0.25
MAX_LATE_S = 2.0
"""Maximum age of `rough_view`."""


@dataclass(frozen=True)
class FleetView:
    """Cards of the workers that serve this gateway's model, and the unclaimed jobs."""

    cards: Sequence[WorkerCard]
    queue: QueueState
    seen_at_s: float  # queue time, like the times in `cards` and `queue`

    @property
    def num_ready(self) -> int:
        """Number of ready workers with a recent heartbeat; a dead worker's card expires later."""
        return sum(card.ready and self.seen_at_s - card.beat_at_s < CARD_LATE_S for card in self.cards)

    def oldest_wait_s(self, lane: str) -> float:
        """Return the age of the lane's oldest job; 0 if the lane is empty."""
        since_s = self.queue.lanes[lane].oldest_at_s
        return 0.0 if since_s is None else max(0.0, self.seen_at_s - since_s)

    def max_model_len(self, limit: int) -> int:
        """Return the minimum of `limit` and the workers' limits: any worker may claim a job."""
        return min([limit, *(card.max_model_len for card in self.cards)])


class Fleet:
    def __init__(self, queue: GatewayQueue, model_name: str, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._model_name = model_name
        self._clock = clock
        self._view: FleetView | None = None
        self._seen_at_s = 0.0
        self._reading: asyncio.Task[FleetView] | None = None

    async def request_block_maps(self) -> None:
        """Ask the workers to add block maps to their cards. Raises QueueUnavailable."""
        await self._queue.request_block_maps()

    async def rough_view(self) -> FleetView:
        """Return a view at most MAX_LATE_S old, usually without waiting. Raises QueueUnavailable."""
        age_s = self._clock() - self._seen_at_s
        if self._view is None or age_s > MAX_LATE_S:
            return await self.view()
        if age_s > MAX_AGE_S:
            self._read_soon()  # an error surfaces once this view is too old
        return self._view

    async def view(self) -> FleetView:
        """Return a view at most MAX_AGE_S old. Concurrent callers share one read and its timeout. Raises
        QueueUnavailable."""
        if self._view is not None and self._clock() - self._seen_at_s <= MAX_AGE_S:
            return self._view
        return await asyncio.shield(self._read_soon())

    def _read_soon(self) -> asyncio.Task[FleetView]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_retrieve_exception)
        return self._reading

    async def _read(self) -> FleetView:
        cards = [card for card in await self._queue.workers() if card.model == self._model_name]
        self._view = FleetView(cards, await self._queue.queue_state(), await self._queue.now_s())
        self._seen_at_s = self._clock()
        return self._view


def _retrieve_exception(reading: asyncio.Task[FleetView]) -> None:
    """Retrieve the exception, so that asyncio does not log it if no caller is left."""
    if not reading.cancelled():
        reading.exception()

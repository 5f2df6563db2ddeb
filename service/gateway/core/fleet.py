"""What the workers say of themselves, asked of the queue at most a few times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.queue.interface import GatewayQueue, QueueState
from service.queue.keys import CARD_LATE_S
from service.queue.messages import WorkerCard

MAX_AGE_S = 0.25
MAX_LATE_S = 2.0
"""Who only wants to know roughly does not wait for a view that is younger."""


@dataclass(frozen=True)
class FleetView:
    """Fresh cards of the workers that serve this gateway's model, and the jobs that nobody has claimed."""

    cards: Sequence[WorkerCard]
    queue: QueueState
    seen_at_s: float  # queue time, as in the cards and of the queue

    @property
    def num_ready(self) -> int:
        """Workers that say so and have said it lately: one that was stopped or hangs still has a card for a while."""
        return sum(card.ready and self.seen_at_s - card.beat_at_s < CARD_LATE_S for card in self.cards)

    def oldest_wait_s(self, lane: str) -> float:
        """How long the first job of the lane has been waiting; 0 where none does."""
        since_s = self.queue.lanes[lane].oldest_at_s
        return 0.0 if since_s is None else max(0.0, self.seen_at_s - since_s)

    def max_model_len(self, limit: int) -> int:
        """The longest sequence that every worker takes, `limit` at most, since any of them may claim a job."""
        return min([limit, *(card.max_model_len for card in self.cards)])


class Fleet:
    def __init__(self, queue: GatewayQueue, model_name: str, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._model_name = model_name
        self._clock = clock
        self._view: FleetView | None = None
        self._seen_at_s = 0.0
        self._reading: asyncio.Task[FleetView] | None = None

    async def look(self) -> None:
        """The cards show the workers' blocks for a while. Raises QueueUnavailable."""
        await self._queue.look()

    async def rough_view(self) -> FleetView:
        """At most MAX_LATE_S old: a request that comes does not wait while another view is being read. Raises
        QueueUnavailable."""
        age_s = self._clock() - self._seen_at_s
        if self._view is None or age_s > MAX_LATE_S:
            return await self.view()
        if age_s > MAX_AGE_S:
            self._read_soon()  # if that fails the view gets too old, and whoever wants one hears of it
        return self._view

    async def view(self) -> FleetView:
        """At most MAX_AGE_S old. Raises QueueUnavailable, to all who wait for it at once: in a queue behind an outage
        each would wait for the timeouts of those before."""
        if self._view is not None and self._clock() - self._seen_at_s <= MAX_AGE_S:
            return self._view
        return await asyncio.shield(self._read_soon())

    def _read_soon(self) -> asyncio.Task[FleetView]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_hear_failure)
        return self._reading

    async def _read(self) -> FleetView:
        cards = [card for card in await self._queue.workers() if card.model == self._model_name]
        self._view = FleetView(cards, await self._queue.queue_state(), await self._queue.now_s())
        self._seen_at_s = self._clock()
        return self._view


def _hear_failure(reading: asyncio.Task[FleetView]) -> None:
    """All who waited may have left."""
    if not reading.cancelled():
        reading.exception()

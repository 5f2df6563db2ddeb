"""What happens when more comes than is worked off: who is told to come again, and when."""

from __future__ import annotations

import math
from collections.abc import Callable

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.fleet import FleetView
from service.observability.metrics import STAT_GENERATION_TOKENS_TOTAL, STAT_PROMPT_TOKENS_TOTAL
from service.queue.interface import Bounds, QueueFull

RETRY_AFTER_S = 2
MAX_RETRY_AFTER_S = 60
REMEMBERED_S = 0.25
"""So long a full queue is taken to be full still: a flood costs nobody the time to read it, nor Redis a question."""
FORGOTTEN_AFTER_S = 5.0
DRAINED_SHARE = 0.1
"""Who was refused is told to come again when so much of what waits should be gone."""
RATE_OVER_S = 2.0


class NoRoom(RequestError):
    """The queue has no room for the request: nothing of it was accepted."""


class BackPressure:
    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.bounds = Bounds(
            max_jobs=settings.max_waiting,
            max_tokens=settings.max_waiting_tokens,
            max_tokens_per_tenant=settings.max_waiting_tokens_per_tenant,
        )
        self._clock = clock
        self._full: dict[str, tuple[float, QueueFull]] = {}  # by tenant, '' for all: until when, and what was said
        self._worked_off = (0.0, 0.0)  # when, tokens
        self._tokens_per_s = 0.0

    def check(self, tenant: str, num_jobs: int) -> None:
        """Raises RequestError, 429 or 503, where it is known already that there is no room. When that knowledge is old,
        one goes through to see."""
        now_s = self._clock()
        for whose in (tenant, ""):
            until_s, full = self._full.get(whose, (0.0, None))
            if full is None:
                continue
            if until_s > now_s:
                raise self._refusal(full)
            self._full[whose] = (now_s + REMEMBERED_S, full)
        if num_jobs > self.bounds.max_jobs:
            raise self._refusal(QueueFull(of_tenant=False, num_jobs=num_jobs, num_tokens=0))

    def refuse_at_once(self, tenant: str) -> None:
        """Raises RequestError, 429 or 503, while it is known that there is no room: its body need not be understood."""
        for whose in (tenant, ""):
            until_s, full = self._full.get(whose, (0.0, None))
            if full is not None and until_s > self._clock():
                raise self._refusal(full)

    def accepted(self, tenant: str) -> None:
        """The queue had room for a job of this tenant."""
        for whose in (tenant, ""):
            self._full.pop(whose, None)

    def refused(self, tenant: str, full: QueueFull) -> NoRoom:
        """The queue has no room for a job of this tenant: what its client hears, and for a while all others too."""
        now_s = self._clock()
        self._full = {whose: entry for whose, entry in self._full.items() if entry[0] > now_s - FORGOTTEN_AFTER_S}
        self._full[tenant if full.of_tenant else ""] = (now_s + REMEMBERED_S, full)
        return self._refusal(full)

    def _refusal(self, full: QueueFull) -> NoRoom:
        waiting = f"{full.num_jobs} of {{}} requests wait already, for up to {full.num_tokens} tokens."
        retry_after_s = self._retry_after_s(full.num_tokens)
        if full.of_tenant:
            message = "Your share of the queue is full: " + waiting.format("your")
            return NoRoom(429, message, "rate_limit_error", code="queue_share_full", retry_after_s=retry_after_s)
        message = "The queue is full: " + waiting.format("all")
        return NoRoom(503, message, "server_error", code="overloaded", retry_after_s=retry_after_s)

    def _retry_after_s(self, num_tokens: int) -> int:
        if not self._tokens_per_s or not num_tokens:
            return RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(num_tokens * DRAINED_SHARE / self._tokens_per_s)))

    def see(self, view: FleetView) -> None:
        """How fast the fleet works off tokens, from its counters, which start again with each worker."""
        counters = (STAT_PROMPT_TOKENS_TOTAL, STAT_GENERATION_TOKENS_TOTAL)
        tokens = sum(card.stats.get(name, 0.0) for card in view.cards for name in counters)
        seen_at_s, before = self._worked_off
        elapsed_s = view.seen_at_s - seen_at_s
        if elapsed_s < RATE_OVER_S:
            return
        if seen_at_s and tokens >= before:
            self._tokens_per_s = (tokens - before) / elapsed_s
        self._worked_off = (view.seen_at_s, tokens)

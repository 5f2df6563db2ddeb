"""Back-pressure: refuses requests while the queue is full and estimates Retry-After."""

from __future__ import annotations

import math
from collections.abc import Callable

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.fleet import FleetView
from service.gateway.core.refusals import RETRY_AFTER_S
from service.observability.worker_metrics import STAT_GENERATION_TOKENS_TOTAL, STAT_PROMPT_TOKENS_TOTAL
from service.queue.interface import Bounds, QueueFull

MAX_RETRY_AFTER_S = 60
REMEMBERED_S = 0.25
"""Time for which a full queue is assumed to stay full. Meanwhile a flood costs no parsing and no Redis calls."""
FORGOTTEN_AFTER_S = 5.0
DRAINED_SHARE = 0.1
"""Retry-After is the time to process this share of the queue."""
RATE_OVER_S = 2.0
ALL = ""
"""Key of the whole queue; the other keys are tenants."""


class NoRoom(RequestError):
    """Refusal by a full queue; no job was accepted."""


class BackPressure:
    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._max_jobs = settings.max_waiting
        self.bounds = Bounds(
            max_jobs=settings.max_waiting,
            max_tokens=settings.max_waiting_tokens,
            max_tokens_per_tenant=settings.max_waiting_tokens_per_tenant,
        )
        self._clock = clock
        self._full: dict[str, tuple[float, QueueFull]] = {}  # by tenant or ALL: (assumed full until, refusal)
        self._worked_off = (0.0, 0.0)  # (queue time, tokens) at the last observation
        self._tokens_per_s = 0.0

    def check(self, tenant: str, num_jobs: int) -> None:
        """Raises RequestError (429, 503) while the queue is assumed full. Every REMEMBERED_S one request probes it."""
        now_s = self._clock()
        for key in (tenant, ALL):
            if key not in self._full:
                continue
            until_s, full = self._full[key]
            if until_s > now_s:
                raise self._refusal(full)
            self._full[key] = (now_s + REMEMBERED_S, full)
        if num_jobs > self._max_jobs:
            raise self._refusal(QueueFull(of_tenant=False, num_jobs=num_jobs, num_tokens=0))

    def check_unread(self, tenant: str) -> None:
        """Like `check`, but before the body is parsed, and never probes. Raises RequestError (429, 503)."""
        for key in (tenant, ALL):
            if key in self._full and self._full[key][0] > self._clock():
                raise self._refusal(self._full[key][1])

    def accepted(self, tenant: str) -> None:
        for key in (tenant, ALL):
            self._full.pop(key, None)

    def refused(self, tenant: str, full: QueueFull) -> NoRoom:
        """Remember that the queue is full, and return the error to send."""
        now_s = self._clock()
        self._full = {key: entry for key, entry in self._full.items() if entry[0] > now_s - FORGOTTEN_AFTER_S}
        self._full[tenant if full.of_tenant else ALL] = (now_s + REMEMBERED_S, full)
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

    def observe(self, view: FleetView) -> None:
        """Update the token rate from the workers' counters, which restart with the workers."""
        counters = (STAT_PROMPT_TOKENS_TOTAL, STAT_GENERATION_TOKENS_TOTAL)
        tokens = sum(card.stats.get(name, 0.0) for card in view.cards for name in counters)
        seen_at_s, before = self._worked_off
        elapsed_s = view.seen_at_s - seen_at_s
        if elapsed_s < RATE_OVER_S:
            return
        if seen_at_s and tokens >= before:
            self._tokens_per_s = (tokens - before) / elapsed_s
        self._worked_off = (view.seen_at_s, tokens)

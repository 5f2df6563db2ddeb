"""A job in memory, its log, and which engines' deaths it is suspected of."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from service.errors import EndReason
from service.queue.interface import (
    ALONE_FOR_EVENTS,
    GETS_ON_BY_EVENTS,
    MAX_DEATHS,
    MAX_DEATHS_IN_ALL,
    NEAR_DEATHS_S,
    SUSPECT_AFTER_DEATHS,
)
from service.queue.messages import Cancel, Event, Job
from service.queue.steady_time import unix_s


@dataclass
class Log:
    """The events of one job; event n is at n - 1."""

    events: list[Event] = field(default_factory=list)
    ended_at_s: float | None = None


class Deaths:
    """Of engines, all of them."""

    def __init__(self) -> None:
        self.num = 0
        self.is_near_another = False  # whether the last one came shortly after the one before
        self._last_s = -math.inf

    def count(self) -> None:
        """An engine has died."""
        now_s = time.monotonic()
        self.is_near_another = now_s - self._last_s < NEAR_DEATHS_S
        self.num, self._last_s = self.num + 1, now_s


@dataclass
class JobState:
    """A job from its acceptance to its end. It waits in one of the queues, or has an owner."""

    job: Job
    owner: str | None = None
    attempts: int = 0
    told: int = 0  # events in its log at the last claim
    deaths: int = 0  # of engines while it was in flight, since it last got on
    first_death: int = 0  # which of all engine deaths the first of them was
    is_near_another: bool = False  # another engine died shortly before that, without it
    others: int = 0  # engines that died since then or shortly before without it
    deaths_in_all: int = 0
    cause: str = ""
    cancel: EndReason | None = None
    stops: tuple[Cancel, ...] = ()
    put_back_at_s: float = 0.0  # the last time

    @property
    def is_deadly(self) -> bool:
        return self.deaths >= MAX_DEATHS + (self.others > 0) or self.deaths_in_all >= MAX_DEATHS_IN_ALL

    @property
    def is_recurrent(self) -> bool:
        return self.deaths_in_all >= MAX_DEATHS_IN_ALL - 2

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPECT_AFTER_DEATHS or self.is_recurrent

    @property
    def alone_for_events(self) -> int:
        standing = "recurrent" if self.is_recurrent else "suspect" if self.is_suspect else ""
        return ALONE_FOR_EVENTS[standing]

    @property
    def is_past_deadline(self) -> bool:
        return self.job.deadline_s is not None and self.job.deadline_s <= unix_s()

    def put_back(self, num_told: int, cause: str | None, deaths: Deaths) -> None:
        """Nobody has it any more; `num_told` events stand in its log. `cause`: what the engine died of while it was in
        flight; that death is the last that was counted."""
        self.owner, self.put_back_at_s = None, unix_s()
        if num_told >= self.told + GETS_ON_BY_EVENTS:
            self.deaths = 0
        if cause is not None:
            if self.deaths == 0:
                self.first_death, self.is_near_another = deaths.num, deaths.is_near_another
            self.deaths += 1
            self.others = self.is_near_another + deaths.num - self.first_death + 1 - self.deaths
            self.deaths_in_all, self.cause = self.deaths_in_all + 1, cause

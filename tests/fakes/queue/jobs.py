"""A job in memory, its log, and the engine deaths it is suspected of."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from service.errors import EndReason
from service.queue.interface import (
    ALONE_FOR_EVENTS,
    MAX_DEATHS,
    MAX_DEATHS_IN_ALL,
    NEAR_DEATHS_S,
    PROGRESS_EVENTS,
    SUSPECT_AFTER_DEATHS,
)
from service.queue.messages import Cancel, Event, Job
from tests.fakes.queue.steady_time import unix_s


@dataclass
class Log:
    """The events of one job; event `n` is at `n - 1`."""

    events: list[Event] = field(default_factory=list)
    ended_at_s: float | None = None


class Deaths:
    """All engine deaths."""

    def __init__(self) -> None:
        self.num = 0
        self.is_near_another = False  # the last death came within NEAR_DEATHS_S of its predecessor
        self._last_s = -math.inf

    def count(self) -> None:
        now_s = time.monotonic()
        self.is_near_another = now_s - self._last_s < NEAR_DEATHS_S
        self.num, self._last_s = self.num + 1, now_s


@dataclass
class JobState:
    """A job from acceptance to end. It waits in one of the queues, or has an owner."""

    job: Job
    owner: str | None = None
    attempts: int = 0
    num_events: int = 0  # in its log at the last claim
    deaths: int = 0  # engine deaths while it was in flight, since its last progress
    first_death: int = 0  # number of the first of them among all engine deaths
    is_near_another: bool = False  # an engine died shortly before that one, without the job
    others: int = 0  # engine deaths without it, since then or shortly before
    deaths_in_all: int = 0
    cause: str = ""
    cancel: EndReason | None = None
    stops: tuple[Cancel, ...] = ()
    put_back_at_s: float = 0.0

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

    def put_back(self, num_events: int, cause: str | None, deaths: Deaths) -> None:
        """Drop the owner; the log has `num_events` events. `cause`: what the engine died of, at the last counted death,
        while the job was in flight."""
        self.owner, self.put_back_at_s = None, unix_s()
        if num_events >= self.num_events + PROGRESS_EVENTS:
            self.deaths = 0
        if cause is not None:
            if self.deaths == 0:
                self.first_death, self.is_near_another = deaths.num, deaths.is_near_another
            self.deaths += 1
            self.others = self.is_near_another + deaths.num - self.first_death + 1 - self.deaths
            self.deaths_in_all, self.cause = self.deaths_in_all + 1, cause

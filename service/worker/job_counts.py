"""Counters of a worker's jobs, and the times of one claim."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from service.engine.request import RequestTimes
from service.observability.buckets import REQUEST_BUCKETS_S, Buckets


def _buckets() -> Buckets:
    return Buckets(REQUEST_BUCKETS_S)


@dataclass(kw_only=True)
class ClaimTimes:
    attempt: int
    queued_s: float  # seconds from the job's admission to the claim
    request: RequestTimes = field(default_factory=RequestTimes)
    claimed_s: float = field(default_factory=time.time)


@dataclass(slots=True)
class JobCounts:
    num_held: int = 0  # claimed and not ended
    num_resumed: int = 0
    num_taken_over: int = 0
    num_lost: int = 0
    queue_time: Buckets = field(default_factory=_buckets)  # seconds
    prefill_time: Buckets = field(default_factory=_buckets)
    inference_time: Buckets = field(default_factory=_buckets)

    def observe_end(self, times: ClaimTimes) -> None:
        """Count the times of an ended job that belong to this claim; queue time belongs to the first claim."""
        request = times.request
        if not request.started_s:
            return
        if times.attempt == 1:
            self.queue_time.observe(times.queued_s + max(0.0, request.started_s - times.claimed_s))
        if request.first_token_s:
            self.prefill_time.observe(max(0.0, request.first_token_s - request.started_s))
        if request.ended_s:
            self.inference_time.observe(max(0.0, request.ended_s - request.started_s))

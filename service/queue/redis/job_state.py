"""What the scripts are told of a job when it enters the queue (`common.lua` says what becomes of it)."""

from __future__ import annotations

from typing import Any

import msgpack

from service.queue import keys
from service.queue.interface import UNBOUNDED, Bounds
from service.queue.job_cost import branches_of, cost_of, lane_of
from service.queue.messages import Job


def new_state(job: Job, attempts: int = 0, deaths: int = 0) -> bytes:
    """The state of a job that nobody has, or that its only owner brings back. Raises ValueError for a job or a door
    whose name is none."""
    state: dict[str, Any] = {"feed": keys.feed(job.feed), "log": keys.events(job.job_id)}
    state |= {"attempts": attempts, "told": 0, "deaths": deaths, "deaths_in_all": deaths}
    state |= {"tenant": job.tenant, "cost": cost_of(job), "lane": lane_of(job), "priority": job.priority}
    state |= {"prompt": len(job.prompt) // 4, "branches": branches_of(job)}
    if job.deadline_s is not None:
        state["deadline"] = job.deadline_s
    return msgpack.packb(state)


def deadline_arg(job: Job) -> str:
    """A deadline as the scripts take it: empty where there is none."""
    return "" if job.deadline_s is None else repr(float(job.deadline_s))


def bound_args(bounds: Bounds = UNBOUNDED) -> tuple[int | str, ...]:
    """Bounds as `submit` takes them: empty where there is none."""
    limits = (bounds.max_jobs, bounds.max_tokens, bounds.max_tokens_per_tenant)
    return tuple("" if limit is None else limit for limit in limits)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from service.queue import keys
from service.queue.codec import encode
from service.queue.interface import UNBOUNDED, Bounds
from service.queue.job_cost import branches_of, cost_of, lane_of
from service.queue.messages import Job, RequestRecord
from service.queue.records import OVERHEAD_BYTES, StorageFull, StorageLimits

ScriptArg = str | bytes | int | float


def new_state(job: Job, attempts: int = 0, deaths: int = 0, prefixes: bytes = b"") -> bytes:
    """Return the packed state of a new job. Raises ValueError for an invalid job or feed name."""
    state: dict[str, Any] = {"feed": keys.feed(job.feed), "log": keys.events(job.job_id)}
    state |= {"attempts": attempts, "told": 0, "deaths": deaths, "deaths_in_all": deaths}
    state |= {"tenant": job.tenant, "cost": cost_of(job), "lane": lane_of(job), "priority": job.priority}
    state |= {"prompt": len(job.prompt) // 4, "branches": branches_of(job)}
    if prefixes:
        state["prefixes"] = prefixes
    if job.deadline_s is not None:
        state["deadline"] = job.deadline_s
    packed: bytes = msgpack.packb(state, use_bin_type=False)
    return packed


def deadline_arg(job: Job) -> str:
    return "" if job.deadline_s is None else repr(float(job.deadline_s))


def bound_args(bounds: Bounds = UNBOUNDED) -> tuple[int | str, ...]:
    """Return ARGV[14..16] of `submit.lua`."""
    limits = (bounds.max_jobs, bounds.max_tokens, bounds.max_tokens_per_tenant)
    return tuple("" if limit is None else limit for limit in limits)


def stored_keys(tenant: str) -> tuple[str, str]:
    return keys.stored(tenant), keys.stored_bytes(tenant)


def record_keys(tenant: str) -> tuple[str, str]:
    return keys.records(tenant), keys.record_bytes(tenant)


def record_life_s(record: RequestRecord, now_s: float) -> int:
    return int(record.deadline_s - now_s) + keys.LOG_ENDED_TTL_S


def record_args(record: RequestRecord, now_s: float, limits: StorageLimits) -> tuple[ScriptArg, ...]:
    """Return ARGV[17..22] of `submit.lua`."""
    payload = encode(record)
    quota = limits.max_record_bytes if record.stays else limits.max_plain_record_bytes
    return (
        payload,
        life_ms(record_life_s(record, now_s)),
        len(payload) + OVERHEAD_BYTES,
        "" if quota is None else quota,
        record.request_id,
        int(record.stays),
    )


def charge_args(name: str, num_bytes: int, for_s: float, limits: StorageLimits) -> tuple[ScriptArg, ...]:
    """Return ARGV[9..13], the charge (ledger.lua)."""
    quota, share = limits.max_bytes_per_tenant, limits.queue_share
    return (name, num_bytes, life_ms(for_s), "" if quota is None else quota, "" if share is None else share)


def life_ms(for_s: float) -> int:
    return max(1, int(for_s * 1000))


def checked(answer: Sequence[Any]) -> Sequence[Any]:
    """Return the answer. Raises StorageFull if the charge was refused."""
    if answer[0] in (-1, -2):
        raise StorageFull(of_tenant=answer[0] == -1, num_bytes=answer[1], max_bytes=answer[2])
    return answer

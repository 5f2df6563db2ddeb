"""Every key that Quire has in Redis, on one page: type, meaning, who writes, who reads, how long it lives.

Every stream entry has one field `m`, the message (see README.md); only the last entry of an event log has `end` too.
Braces are part of a key: they keep what belongs to one job in one slot.
"""

from __future__ import annotations

import re

PAYLOAD_FIELD = "m"
END_FIELD = "end"

JOBS = "quire:jobs"
"""Stream. Accepted jobs, m = Job; those pending in the group are claimed. Doors write, workers read. An entry lives
until its job has ended."""
JOBS_GROUP = "workers"
"""Group of JOBS; a consumer is one worker's broker."""

CANCELS = "quire:cancels"
"""Stream. Cancels for every worker, m = Cancel. Doors write, workers read. The last CANCELS_MAX_ENTRIES."""
CANCELS_MAX_ENTRIES = 8192

WORKERS = "quire:workers"
"""Sorted set. Worker ids by the Redis time of their last heartbeat. Workers write, doors read. CARD_TTL_S likewise."""
CARD_TTL_S = 10
CARD_LATE_S = 3.5
"""A worker writes its card every second; one whose card is older than this is not ready."""

LOOKED_AT = "quire:looked_at"
"""String. There while somebody looks at the workers' blocks. Doors write, workers read. LOOKED_AT_TTL_S."""
LOOKED_AT_TTL_S = 10

LOG_RUNNING_TTL_S = 24 * 3600
LOG_ENDED_TTL_S = 600
TOMBSTONE_TTL_S = 24 * 3600
FEED_MAX_ENTRIES = 1024
FEED_TTL_S = 600
REPLY_TTL_S = 600

INGRESS_GROUP = "doors"
"""Group of every ingress stream; a consumer is one door's broker."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def events(job_id: str) -> str:
    """Stream. The job's event log, m = Event; the entry `<number>-0` is event `<number>`, so none can be there twice.
    Workers write, doors read. LOG_RUNNING_TTL_S without news, LOG_ENDED_TTL_S after the end."""
    return f"quire:{{{_name(job_id)}}}:events"


def cancel(job_id: str) -> str:
    """String. Tombstone: why a job that may still be queued is no longer wanted (an EndReason). Doors write,
    workers read. Until the job has ended, TOMBSTONE_TTL_S at most."""
    return f"quire:{{{_name(job_id)}}}:cancel"


def request(request_id: str) -> str:
    """String. RequestRecord. Doors write and read. From acceptance to LOG_ENDED_TTL_S after its deadline."""
    return f"quire:{{{_name(request_id)}}}:request"


def watched(request_id: str) -> str:
    """String. There while somebody waits for a request that outlives its clients, and a while after. Doors write and
    read. As long as its writer says."""
    return f"quire:{{{_name(request_id)}}}:watched"


def idempotency(digest: str) -> str:
    """String. Request id that a client's Idempotency-Key stands for; the key is hashed together with its tenant. Doors
    write and read. As long as the request's record."""
    return f"quire:idempotency:{_name(digest)}"


def feed(door: str) -> str:
    """Stream. All events for one door, one entry a step and worker, m = Events one behind the other. Workers write,
    that door reads. The last FEED_MAX_ENTRIES, FEED_TTL_S after the last."""
    return f"quire:feed:{_name(door)}"


def worker(worker_id: str) -> str:
    """String. WorkerCard. That worker writes, doors read. CARD_TTL_S after the last heartbeat."""
    return f"quire:worker:{_name(worker_id)}"


def ingress(producer: str) -> str:
    """Stream. Jobs of one foreign producer, m = IngressJob. That producer writes, doors read (group `doors`). An entry
    lives until its job has its final reply."""
    return f"quire:ingress:{_name(producer)}"


def reply(producer: str, producer_job_id: str) -> str:
    """Stream. Replies to one job of a foreign producer, m = Reply. Doors write, that producer reads. REPLY_TTL_S after
    the last write."""
    return f"quire:reply:{_name(producer)}:{_name(producer_job_id)}"


def _name(name: str) -> str:
    """A part of a key, which decides what it opens. Raises ValueError unless it matches _NAME."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name in a Redis key is {_NAME.pattern}")
    return name

"""Every key that Quire has in Redis, on one page: type, meaning, who writes, who reads, how long it lives.

Every stream entry has one field `m`, the message (see README.md); only the last entry of an event log has `end` too.
Braces are part of a key. Those around `quire` keep all of a queue in one slot of a Redis Cluster: each step of a job's
life is one act on several of its keys.
"""

from __future__ import annotations

import re

PAYLOAD_FIELD = "m"
PAYLOAD = PAYLOAD_FIELD.encode()  # as Redis answers

JOBS = "{quire}:jobs"
"""Hash. Job id to Job. Doors write, workers read. From acceptance to the end."""
STATES = "{quire}:states"
"""Hash. Job id to what the scripts must know of it (see common.lua). Doors and workers write and read, by scripts
alone. From acceptance to the end."""
CLAIMS = "{quire}:claims"
"""Hash. Job id to its fence, `<attempt> <worker>`. Workers write and read. While it is claimed."""
DEADLINES = "{quire}:deadlines"
"""Sorted set. Job ids by deadline, queue time. Doors write, workers read. From acceptance to the end."""
WAITING = "{quire}:waiting"
"""Stream. Accepted jobs, m = job id. Doors write, workers read. An entry lives until its job is claimed."""
WAITING_TOKENS = "{quire}:waiting:tokens"
"""Hash. Tenant to the tokens that its waiting jobs may cost, '' to those of all. Scripts write, doors read. As long as
any wait. Of the other keys of the order in which jobs are claimed doors read `waiting_since`; the rest are the scripts'
own, and `fair.lua` says what they are: `{quire}:waiting:lane:<lane>`, `{quire}:waiting:jobs:<lane>:<tenant>`,
`{quire}:waiting:times`."""
RETURNED = "{quire}:returned"
"""Stream. Jobs that were claimed before, m = job id; they go first. Workers write and read. Until claimed again."""
SUSPECTS = "{quire}:suspects"
"""Stream. Jobs that were in flight at two engine deaths, m = job id; they run alone. Workers write and read. Until
claimed again."""
LEASES = "{quire}:leases"
"""Sorted set. Workers by the queue time at which their lease runs out. Workers write and read. Until taken over."""
EPOCH = "{quire}:epoch"
"""String. A random name of these data: who finds another knows that Redis has lost everything. Doors and workers write
and read. For ever."""
CLOCK = "{quire}:epoch:clock"
"""Hash. wall: what Redis' clock said; queue: what time that was in the queue. Scripts write and read. For ever."""
QUEUE = (JOBS, STATES, CLAIMS, DEADLINES, WAITING, RETURNED, SUSPECTS, LEASES, EPOCH)
"""The first keys of every script."""

ALONE = "{quire}:alone"
"""String. The worker that runs suspects. Workers write and read. As long as a lease."""
DEATHS = "{quire}:deaths"
"""Hash. num: how many engines have died; last_s: when the last did (queue time); told: names of the last few, so that
none is counted twice. Workers write and read. For ever."""
DEAD = "{quire}:dead"
"""Stream. Jobs that killed engines, m = DeadLetter. Workers write, people read. The last DEAD_MAX_ENTRIES."""
DEAD_MAX_ENTRIES = 1024

CANCELS = "{quire}:cancels"
"""Stream. Cancels for every worker, m = Cancel. Doors write, workers read. The last CANCELS_MAX_ENTRIES."""
CANCELS_MAX_ENTRIES = 8192

WORKERS = "{quire}:workers"
"""Sorted set. Worker ids by the queue time of their last heartbeat. Workers write, doors read. CARD_TTL_S likewise."""
CARD_TTL_S = 10
CARD_LATE_S = 3.5
"""A worker writes its card every second; one whose card is older than this is not ready."""

LOOKED_AT = "{quire}:looked_at"
"""String. There while somebody looks at the workers' blocks. Doors write, workers read. LOOKED_AT_TTL_S."""
LOOKED_AT_TTL_S = 10

LOG_RUNNING_TTL_S = 24 * 3600
LOG_ENDED_TTL_S = 600
TOMBSTONE_TTL_S = 24 * 3600
FEED_MAX_ENTRIES = 1024
FEED_TTL_S = 600
REPLY_TTL_S = 600

FILE_TTL_S = 30 * 24 * 3600
UPLOAD_TTL_S = 600
"""Of a file that is being written, after the last piece."""
BATCH_ENDED_TTL_S = 3600

OPEN_BATCHES = "{quire}:batches"
"""Sorted set. `<batch id> <tenant>` of batches that are not done, by when they were made. Doors write and read. As long
as they are."""

INGRESS_KEEP_S = 5.0
INGRESS_LEFT_S = 20.0
INGRESS_GROUP = "doors"
"""Group of every ingress stream; a consumer is one door's queue."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def waiting_since(lane: str) -> str:
    """Sorted set. Jobs that wait in the lane and were never claimed, by when they were accepted (queue time). Scripts
    write, doors read. As long as any wait."""
    return f"{{quire}}:waiting:since:{_name(lane)}"


def events(job_id: str) -> str:
    """Stream. The job's event log, m = Event; the entry `<number>-0` is event `<number>`, so none can be there twice.
    Workers write, doors read. LOG_RUNNING_TTL_S without news, LOG_ENDED_TTL_S after the end."""
    return f"{{quire}}:{{{_name(job_id)}}}:events"


def cancel(job_id: str) -> str:
    """String. Tombstone: why a job that is still to come is not wanted (an EndReason). Doors write and read. Until the
    job comes, TOMBSTONE_TTL_S at most."""
    return f"{{quire}}:{{{_name(job_id)}}}:cancel"


def request(request_id: str) -> str:
    """String. RequestRecord. Doors write and read. From acceptance to LOG_ENDED_TTL_S after its deadline."""
    return f"{{quire}}:{{{_name(request_id)}}}:request"


def watched(request_id: str) -> str:
    """String. There while somebody waits for a request that outlives its clients, and a while after. Doors write and
    read. As long as its writer says."""
    return f"{{quire}}:{{{_name(request_id)}}}:watched"


def idempotency(digest: str) -> str:
    """String. Request id that a client's Idempotency-Key stands for; the key is hashed together with its tenant. Doors
    write and read. As long as the request's record."""
    return f"{{quire}}:idempotency:{_name(digest)}"


def file(file_id: str) -> str:
    """String. StoredFile. Doors write and read. FILE_TTL_S."""
    return f"{{quire}}:{{{_name(file_id)}}}:file"


def file_data(file_id: str) -> str:
    """List. What the file contains, in pieces. Doors write and read. UPLOAD_TTL_S, then FILE_TTL_S."""
    return f"{{quire}}:{{{_name(file_id)}}}:data"


def files(tenant: str) -> str:
    """Sorted set. Ids of a tenant's files by when they were made. Doors write and read. FILE_TTL_S after the last."""
    return f"{{quire}}:files:{_name(tenant)}"


def batch(batch_id: str) -> str:
    """String. Batch. Doors write and read. FILE_TTL_S after the last change."""
    return f"{{quire}}:{{{_name(batch_id)}}}:batch"


def batch_lines(batch_id: str) -> str:
    """Hash. Answers by line of the batch's input. Doors write and read. FILE_TTL_S."""
    return f"{{quire}}:{{{_name(batch_id)}}}:lines"


def batch_marks(batch_id: str) -> str:
    """String. A byte for each line of the batch's input: how it was answered (see put_line.lua). Doors write and read.
    FILE_TTL_S."""
    return f"{{quire}}:{{{_name(batch_id)}}}:marks"


def batch_progress(batch_id: str) -> str:
    """Hash. How far the batch's answers are in its files (see move_lines.lua). Doors write and read. FILE_TTL_S,
    BATCH_ENDED_TTL_S after its end."""
    return f"{{quire}}:{{{_name(batch_id)}}}:progress"


def batch_holder(batch_id: str) -> str:
    """String. The door that sees to the batch. Doors write and read. As long as it renews."""
    return f"{{quire}}:{{{_name(batch_id)}}}:holder"


def batch_cancel(batch_id: str) -> str:
    """String. There if the batch is no longer wanted. Doors write and read. FILE_TTL_S."""
    return f"{{quire}}:{{{_name(batch_id)}}}:unwanted"


def batches(tenant: str) -> str:
    """Sorted set. Ids of a tenant's batches by when they were made. Doors write and read. FILE_TTL_S after the last."""
    return f"{{quire}}:batches:{_name(tenant)}"


def response(response_id: str) -> str:
    """String. StoredResponse. Doors write and read. As long as its writer says."""
    return f"{{quire}}:{{{_name(response_id)}}}:response"


def stored(tenant: str) -> str:
    """Sorted set. What is stored for a tenant, by when it expires: ids of files, batches and responses. Doors write and
    read, by scripts alone (see ledger.lua). As long as any of it."""
    return f"{{quire}}:stored:{_name(tenant)}"


def stored_bytes(tenant: str) -> str:
    """Hash. The same to the bytes that it takes, '' to those of all. Likewise."""
    return f"{{quire}}:stored:bytes:{_name(tenant)}"


def records(tenant: str) -> str:
    """Sorted set. Records of a tenant's requests, by when they expire. Likewise."""
    return f"{{quire}}:records:{_name(tenant)}"


def record_bytes(tenant: str) -> str:
    """Hash. The same to the bytes that they take, '' to those of all. Likewise."""
    return f"{{quire}}:records:bytes:{_name(tenant)}"


def feed(door: str) -> str:
    """Stream. All events for one door, one entry a step and worker, m = a list of Events. Workers write,
    that door reads. The last FEED_MAX_ENTRIES, FEED_TTL_S after the last."""
    return f"{{quire}}:feed:{_name(door)}"


def worker(worker_id: str) -> str:
    """String. WorkerCard. That worker writes, doors read. CARD_TTL_S after the last heartbeat."""
    return f"{{quire}}:worker:{_name(worker_id)}"


def ingress(producer: str) -> str:
    """Stream. Jobs of one foreign producer, m = IngressJob. That producer writes, doors read (group `doors`). An entry
    lives until its job has its final reply."""
    return f"{{quire}}:ingress:{_name(producer)}"


def reply(producer: str, producer_job_id: str) -> str:
    """Stream. Replies to one job of a foreign producer, m = Reply; the entry `<number>-0` is reply `<number>`, so none
    can be there twice. Doors write, that producer reads. REPLY_TTL_S after the last write."""
    return f"{{quire}}:reply:{_name(producer)}:{_name(producer_job_id)}"


def reply_of(producer: str, producer_job_id: str) -> str:
    """Hash. Which ingress entry the replies answer: entry, digest of its message, done (the number of the last). Doors
    write and read. LOG_RUNNING_TTL_S, REPLY_TTL_S from the last reply on."""
    return f"{{quire}}:reply:{_name(producer)}:{_name(producer_job_id)}:of"


def _name(name: str) -> str:
    """A part of a key, which decides what it opens. Raises ValueError unless it matches _NAME."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name in a Redis key is {_NAME.pattern}")
    return name

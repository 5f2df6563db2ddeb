"""Every Redis key: type, content, writers > readers (GW: gateways, WK: workers), life. Stream entries have one field
`m`, the message; a log's last also `end`. `{quire}` is a Cluster slot."""

from __future__ import annotations

import re

PAYLOAD_FIELD = "m"
PAYLOAD = PAYLOAD_FIELD.encode()

JOBS = "{quire}:jobs"
"""Hash. Job id -> Job. GW > WK. Until the job's end."""
STATES = "{quire}:states"
"""Hash. Job id -> state (common.lua). Scripts only. Until the job's end."""
CLAIMS = "{quire}:claims"
"""Hash. Job id -> fence `<attempt> <worker>`. WK. While claimed."""
DEADLINES = "{quire}:deadlines"
"""Sorted set. Job ids by deadline, queue time. GW > WK. Until the job's end."""
WAITING = "{quire}:waiting"
"""Stream. Accepted job ids. GW > WK. Until claimed."""
WAITING_TOKENS = "{quire}:waiting:tokens"
"""Hash. Tenant -> waiting cost; '' -> total (see fair.lua). Scripts > GW. While any wait."""
WAITING_PREFIXES = "{quire}:waiting:prefixes"
"""Hash. Slot of a prompt prefix -> rest of its digest, its worker (prefixes.py). WK. For ever; NUM_SLOTS."""
WAITING_LOADS = "{quire}:waiting:loads"
"""Hash. Worker -> branches held and free at its last claim. WK. While it has a lease."""
RETURNED = "{quire}:returned"
"""Stream. Job ids claimed before. WK. Until claimed."""
SUSPECTS = "{quire}:suspects"
"""Stream. Job ids that run alone. WK. Until claimed."""
LEASES = "{quire}:leases"
"""Sorted set. Workers by lease end, queue time. WK. Until taken over."""
EPOCH = "{quire}:epoch"
"""String. Random name, lost with the data. GW, WK. For ever."""
CLOCK = "{quire}:epoch:clock"
"""Hash. wall: Redis' clock; queue: queue time. Scripts. For ever."""
QUEUE = (JOBS, STATES, CLAIMS, DEADLINES, WAITING, RETURNED, SUSPECTS, LEASES, EPOCH)
"""First keys of every script."""

ALONE = "{quire}:alone"
"""String. Worker that runs suspects. WK. A lease."""
DEATHS = "{quire}:deaths"
"""Hash. Engine deaths: number, last time, names. WK. For ever."""
DEAD = "{quire}:dead"
"""Stream. m = DeadLetter. WK > operators. The last DEAD_MAX_ENTRIES."""
DEAD_MAX_ENTRIES = 1024

CANCELS = "{quire}:cancels"
"""Stream. m = Cancel. GW > WK. The last CANCELS_MAX_ENTRIES."""
CANCELS_MAX_ENTRIES = 8192

WORKERS = "{quire}:workers"
"""Sorted set. Worker ids by heartbeat. WK > GW. CARD_TTL_S."""
CARD_TTL_S = 10
CARD_LATE_S = 3.5
"""Age of a card that is not ready."""

LOOKED_AT = "{quire}:looked_at"
"""String. Block maps are requested. GW > WK. LOOKED_AT_TTL_S."""
LOOKED_AT_TTL_S = 10

LOG_RUNNING_TTL_S = 24 * 3600
LOG_ENDED_TTL_S = 600
TOMBSTONE_TTL_S = 24 * 3600
FEED_MAX_ENTRIES = 1024
FEED_TTL_S = 600
REPLY_TTL_S = 600

FILE_TTL_S = 30 * 24 * 3600
UPLOAD_TTL_S = 600
BATCH_ENDED_TTL_S = 3600

OPEN_BATCHES = "{quire}:batches"
"""Sorted set. `<batch id> <tenant>` by creation. GW. While open."""

ADAPTERS = "{quire}:adapters"
"""Hash. Name -> AdapterRecord, loaded at run time. GW. Until unloaded."""

INGRESS_KEEP_S = 5.0
INGRESS_LEFT_S = 20.0
INGRESS_GROUP = "doors"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def waiting_since(lane: str) -> str:
    """Sorted set. Jobs by acceptance. Scripts > GW. While any wait."""
    return f"{{quire}}:waiting:since:{_name(lane)}"


def events(job_id: str) -> str:
    """Stream. m = Event, entry `<number>-0`. WK > GW. LOG_RUNNING_TTL_S, LOG_ENDED_TTL_S after the end."""
    return f"{{quire}}:{{{_name(job_id)}}}:events"


def cancel(job_id: str) -> str:
    """String. EndReason of an unsubmitted job. GW. Until submitted; TOMBSTONE_TTL_S."""
    return f"{{quire}}:{{{_name(job_id)}}}:cancel"


def request(request_id: str) -> str:
    """String. RequestRecord. GW. Until LOG_ENDED_TTL_S after its deadline."""
    return f"{{quire}}:{{{_name(request_id)}}}:request"


def watched(request_id: str) -> str:
    """String. A client waits. GW. `mark_watched`'s for_s."""
    return f"{{quire}}:{{{_name(request_id)}}}:watched"


def idempotency(digest: str) -> str:
    """String. Request id of a hashed Idempotency-Key or client's request id. GW. As the record."""
    return f"{{quire}}:idempotency:{_name(digest)}"


def file(file_id: str) -> str:
    """String. StoredFile. GW. FILE_TTL_S."""
    return f"{{quire}}:{{{_name(file_id)}}}:file"


def file_data(file_id: str) -> str:
    """List. Pieces. GW. UPLOAD_TTL_S, then FILE_TTL_S."""
    return f"{{quire}}:{{{_name(file_id)}}}:data"


def files(tenant: str) -> str:
    """Sorted set. File ids by creation. GW. FILE_TTL_S after the last."""
    return f"{{quire}}:files:{_name(tenant)}"


def batch(batch_id: str) -> str:
    """String. Batch. GW. FILE_TTL_S after the last change."""
    return f"{{quire}}:{{{_name(batch_id)}}}:batch"


def batch_lines(batch_id: str) -> str:
    """Hash. Line -> answer. GW. FILE_TTL_S."""
    return f"{{quire}}:{{{_name(batch_id)}}}:lines"


def batch_marks(batch_id: str) -> str:
    """String. A byte per line (put_line.lua). GW. FILE_TTL_S."""
    return f"{{quire}}:{{{_name(batch_id)}}}:marks"


def batch_progress(batch_id: str) -> str:
    """Hash. Progress (move_lines.lua). GW. FILE_TTL_S, then BATCH_ENDED_TTL_S."""
    return f"{{quire}}:{{{_name(batch_id)}}}:progress"


def batch_holder(batch_id: str) -> str:
    """String. Its gateway. GW. While renewed."""
    return f"{{quire}}:{{{_name(batch_id)}}}:holder"


def batch_cancel(batch_id: str) -> str:
    """String. It is cancelled. GW. FILE_TTL_S."""
    return f"{{quire}}:{{{_name(batch_id)}}}:unwanted"


def batches(tenant: str) -> str:
    """Sorted set. Batch ids by creation. GW. FILE_TTL_S after the last."""
    return f"{{quire}}:batches:{_name(tenant)}"


def response(response_id: str) -> str:
    """String. StoredResponse. GW. `put_response`'s for_s."""
    return f"{{quire}}:{{{_name(response_id)}}}:response"


def stored(tenant: str) -> str:
    """Sorted set. Stored ids by expiry (ledger.lua). GW. While any is left."""
    return f"{{quire}}:stored:{_name(tenant)}"


def stored_bytes(tenant: str) -> str:
    """Hash. Stored id -> bytes; '' -> total. GW. While any is left."""
    return f"{{quire}}:stored:bytes:{_name(tenant)}"


def records(tenant: str) -> str:
    """Sorted set. Request ids by expiry. GW. While any is left."""
    return f"{{quire}}:records:{_name(tenant)}"


def record_bytes(tenant: str) -> str:
    """Hash. Request id -> bytes; '' -> total. GW. While any is left."""
    return f"{{quire}}:records:bytes:{_name(tenant)}"


def feed(gateway: str) -> str:
    """Stream. m = list of Events. WK > that GW. The last FEED_MAX_ENTRIES, FEED_TTL_S."""
    return f"{{quire}}:feed:{_name(gateway)}"


def worker(worker_id: str) -> str:
    """String. WorkerCard. WK > GW, WK. CARD_TTL_S."""
    return f"{{quire}}:worker:{_name(worker_id)}"


def ingress(producer: str) -> str:
    """Stream. m = IngressJob. Producer > GW. Until its final reply."""
    return f"{{quire}}:ingress:{_name(producer)}"


def reply(producer: str, producer_job_id: str) -> str:
    """Stream. m = Reply, entry `<number>-0`. GW > producer. REPLY_TTL_S."""
    return f"{{quire}}:reply:{_name(producer)}:{_name(producer_job_id)}"


def reply_of(producer: str, producer_job_id: str) -> str:
    """Hash. entry, digest, done. GW. LOG_RUNNING_TTL_S, then REPLY_TTL_S."""
    return f"{{quire}}:reply:{_name(producer)}:{_name(producer_job_id)}:of"


def _name(name: str) -> str:
    """Raises ValueError: a key must not address another."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name in a Redis key is {_NAME.pattern}")
    return name

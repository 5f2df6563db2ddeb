"""Queue between gateways and workers, implemented in service/queue/redis."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from service.queue.job_cost import LANES
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.records import (
    UNLIMITED,
    AdapterRecord,
    Batch,
    Move,
    MovedLines,
    OpenBatch,
    StorageLimits,
    StoredFile,
    StoredResponse,
)


class QueueUnavailable(Exception):
    """The queue is unreachable or refuses writes; nothing was written, unless OutcomeUnknown."""


class OutcomeUnknown(QueueUnavailable):
    """The call may still take effect: repeat it under the same id."""


SUSPECT_AFTER_DEATHS = 2
MAX_DEATHS = 3
"""Crashes without progress: after 2 a job runs alone, after 3 it is dead-lettered; after 4 if engines also died without
it since the first, or up to NEAR_DEATHS_S before."""
NEAR_DEATHS_S = 30.0
PROGRESS_EVENTS = 3
"""A job that crashes every decode still emits a token per attempt."""
MAX_DEATHS_IN_ALL = 6
"""Crashes with progress; before the last two the job runs alone."""
ALONE_FOR_EVENTS = {"": 0, "suspect": PROGRESS_EVENTS, "recurrent": 1 << 62}
"""Standing -> number of events that the job emits alone."""


@dataclass(frozen=True)
class Claim:
    """Claimed job. `attempt` counts claims from 1 and fences off earlier owners."""

    job: Job
    attempt: int
    alone_for_events: int = 0
    history: tuple[Event, ...] = ()  # of earlier attempts: 1, 2, 3, ..., no `end`
    stops: tuple[Cancel, ...] = ()  # cancels of branches

    @property
    def is_suspect(self) -> bool:
        return self.alone_for_events > 0


@dataclass(frozen=True, kw_only=True)
class ClaimBudget:
    """Work that a worker can start. Jobs are claimed while any is left, so the last may exceed it; then tenants within
    their shares (service/fair_share.py) still reclaim slots."""

    num_tokens: int | None = None  # of prompts and histories; None: no limit
    num_reserved: int = 0  # branches, for tenants within their shares
    num_slots: int = 0  # shared by tenants; 0: reclaim nothing
    slots_by_tenant: Mapping[str, int] = field(default_factory=dict)  # in use
    num_tenants: int = 1  # that share the slots, including recent ones
    num_reclaimable_tokens: int = 0  # `num_tokens` if all running jobs were preempted
    num_held: int | None = None  # branches; if given, jobs may be left to a better worker for KEEP_S (prefixes.py)

    def is_restricted(self, max_branches: int) -> bool:
        """Return True if the budget may exclude waiting jobs."""
        return max_branches <= self.num_reserved or (self.num_tokens is not None and self.num_tokens <= 0)


UNLIMITED_BUDGET = ClaimBudget()


@dataclass(frozen=True)
class Lease:
    lost: frozenset[str]  # to other workers
    runs_suspects: bool  # one at a time


@dataclass(frozen=True)
class IngressEntry:
    producer: str
    entry_id: str
    payload: bytes
    was_left: bool = False  # by a dead gateway, perhaps partly answered


class Standing(Enum):
    OURS = 1
    TAKEN = 0  # held by another gateway
    REPEATED = -1  # an earlier entry's, same message
    IN_USE = -2  # an unfinished entry's, other message


@dataclass(frozen=True)
class ReplyStream:
    standing: Standing
    replies: Sequence[bytes] = ()  # if OURS: 1, 2, 3, ...


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of waiting jobs and their job_cost.cost_of; None: no limit."""

    max_jobs: int | None = None
    max_tokens: int | None = None
    max_tokens_per_tenant: int | None = None


UNBOUNDED = Bounds()


@dataclass(eq=False)
class QueueFull(Exception):
    """The backlog is full, in total or for the job's tenant."""

    of_tenant: bool
    num_jobs: int
    num_tokens: int


@dataclass(frozen=True)
class Backlog:
    num_jobs: int
    num_tokens: int
    num_own_tokens: int  # of the given tenant


RETURNED, SUSPECT = "returned", "suspect"
QUEUE_LANES = (*LANES, RETURNED, SUSPECT)
"""Queues: never claimed, by lane; claimed before; suspects."""


@dataclass(frozen=True)
class Lane:
    num_jobs: int
    oldest_at_s: float | None  # queue time of the first job


@dataclass(frozen=True)
class QueueState:
    lanes: Mapping[str, Lane]
    num_leases: int  # not expired

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_jobs for lane in self.lanes.values())


class BatchStore(Protocol):
    """Files and batches, kept for FILE_TTL_S and charged to their tenant. An invalid id raises ValueError."""

    async def reserve_file(self, file_id: str, tenant: str, num_bytes: int, limits: StorageLimits) -> None:
        """Charge for a file to be written, for UPLOAD_TTL_S. Raises StorageFull."""

    async def append_file(
        self, file_id: str, tenant: str, data: bytes, limits: StorageLimits = UNLIMITED, *, is_reserved: bool = False
    ) -> int:
        """Append a piece, charged unless `is_reserved`; return the number of pieces. Expires in UPLOAD_TTL_S without
        `put_file`. Raises StorageFull."""

    async def put_file(self, file: StoredFile) -> None:
        """Keep a written file."""

    async def get_file(self, file_id: str) -> StoredFile | None: ...

    async def file_pieces(self, file_id: str, first: int, count: int) -> Sequence[bytes]:
        """Return at most `count` pieces; none for a missing file."""

    async def list_files(self, tenant: str) -> Sequence[StoredFile]:
        """Return files, newest first."""

    async def drop_file(self, file_id: str, tenant: str) -> None:
        """Drop a file, finished or not."""

    async def put_batch(self, batch: Batch, limits: StorageLimits = UNLIMITED) -> None:
        """Write a batch. Raises StorageFull for a new one beyond `limits`."""

    async def get_batch(self, batch_id: str) -> Batch | None: ...

    async def list_batches(self, tenant: str, after: str | None, count: int) -> Sequence[Batch]:
        """Return the next `count` batches after `after`, newest first."""

    async def open_batches(self) -> Sequence[OpenBatch]:
        """Return open batches, oldest first."""

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        """Lock the batch for `for_s`, or renew the lock; return False if another holder has it."""

    async def cancel_batch(self, batch_id: str) -> None:
        """Mark the batch cancelled."""

    async def is_batch_cancelled(self, batch_id: str) -> bool: ...

    async def reserve_lines(self, batch: Batch, num_bytes: int, limits: StorageLimits) -> None:
        """Charge at least `num_bytes` for answers. Raises StorageFull."""

    async def put_line(
        self, batch: Batch, number: int, line: bytes, mark: bytes, limits: StorageLimits = UNLIMITED
    ) -> None:
        """Write a line's first answer, marked ANSWERED_WELL or ANSWERED_BADLY. Raises StorageFull."""

    async def line_marks(self, batch_id: str) -> bytes:
        """Return one byte per line, up to the last answered."""

    async def line_sizes(self, batch_id: str, first: int, count: int) -> Sequence[int]:
        """Return answers' bytes; 0 if missing."""

    async def lines(self, batch_id: str, first: int, count: int) -> Sequence[bytes | None]: ...

    async def moved_lines(self, batch_id: str) -> MovedLines: ...

    async def move_lines(self, batch: Batch, move: Move) -> int:
        """Move answers to files, atomically and once; return the first line not moved."""

    async def drop_lines(self, batch: Batch) -> None:
        """Drop moved answers and their charge."""


class ResponseStore(Protocol):
    """Stored responses. An invalid id raises ValueError."""

    async def put_response(self, record: StoredResponse, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        """Keep a response for `for_s`. Raises StorageFull."""

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        """Replace a record unless dropped; never refused."""

    async def get_response(self, response_id: str) -> StoredResponse | None: ...

    async def drop_response(self, record: StoredResponse) -> None: ...


class AdapterStore(Protocol):
    """LoRA adapters loaded at run time, kept until dropped."""

    async def put_adapter(self, record: AdapterRecord, *, replaces: bool) -> bool:
        """Write a record, replacing one of the same name if `replaces`; return whether it was written."""

    async def get_adapter(self, name: str) -> AdapterRecord | None: ...

    async def list_adapters(self) -> Sequence[AdapterRecord]:
        """Return records, sorted by name."""

    async def drop_adapter(self, name: str) -> bool:
        """Drop a record; return whether it existed."""


class RequestStore(Protocol):
    """Accepted requests, which any gateway can answer or end."""

    async def put_request(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        """Keep a record until LOG_ENDED_TTL_S after its deadline. Return its id, or that of a record with the same
        `idempotency` (a hash). Raises StorageFull."""

    async def get_request(self, request_id: str) -> RequestRecord | None:
        """Return the record, or None. Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def find_holder(self, idempotency: str) -> str | None:
        """Return the id of the last record put with this hash; the record may be gone."""

    async def drop_request(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        """Drop a record and its idempotency key, unless job `unless_there` was accepted."""

    async def mark_watched(self, request_id: str, for_s: float) -> None:
        """Mark for `for_s` that a client waits."""

    async def is_watched(self, request_id: str) -> bool: ...


class IngressQueue(Protocol):
    """Entries of foreign producers, renewed every INGRESS_KEEP_S; after INGRESS_LEFT_S another gateway gets them."""

    async def fetch_entries(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        """Return new entries, each to only one gateway."""

    async def renew_entries(self) -> Sequence[IngressEntry]:
        """Renew fetched entries; return the ids another gateway has taken."""

    async def begin_replies(self, entry: IngressEntry, reply_id: str) -> ReplyStream:
        """Take the reply stream `reply_id` for a fetched entry."""

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        """Append reply `number` once, none after the last; return False if another gateway has the entry."""

    async def settle_entry(self, entry: IngressEntry) -> None:
        """Remove an answered entry."""

    def release_entry(self, entry: IngressEntry) -> None:
        """Stop renewing the entry."""


class EventStream(Protocol):
    def __aiter__(self) -> EventStream: ...

    def __anext__(self) -> Awaitable[Event]: ...

    def take_arrived(self) -> Sequence[Event]:
        """Return the next events available without waiting."""

    async def aclose(self) -> None: ...


class GatewayQueue(Protocol):
    @property
    def batches(self) -> BatchStore: ...

    @property
    def responses(self) -> ResponseStore: ...

    @property
    def requests(self) -> RequestStore: ...

    @property
    def adapters(self) -> AdapterStore: ...

    @property
    def ingress(self) -> IngressQueue: ...

    async def submit(
        self,
        job: Job,
        bounds: Bounds = UNBOUNDED,
        record: RequestRecord | None = None,
        limits: StorageLimits = UNLIMITED,
    ) -> None:
        """Accept a job, once, atomically with its `record`. Beyond `limits`, a record that ends with its client is
        omitted. Raises QueueFull, StorageFull, QueueUnavailable, OutcomeUnknown, or WireError if too large."""

    async def backlog(self, tenant: str) -> Backlog: ...

    async def queue_position(self, job_id: str) -> int | None:
        """Return the number of the tenant's jobs ahead; None unless waiting."""

    def follow(self, job_id: str, after: int = 0) -> EventStream:
        """Iterate over the events after number `after`, in order, each once; cheapest before `submit`. Waits out
        outages; a lost job ends with LOST. Raises QueueUnavailable for a gap or a closed queue, ValueError for an id
        outside [A-Za-z0-9_.-]{1,128}."""

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        """Return each log's last event."""

    async def cancel(self, cancel: Cancel) -> None:
        """End a waiting job, or send the cancel to its worker; keep it for an unsubmitted job."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Return fresh cards."""

    async def request_block_maps(self) -> None:
        """Request block maps on workers' cards for LOOKED_AT_TTL_S."""

    async def queue_state(self) -> QueueState: ...

    async def now_s(self) -> float:
        """Return queue time, Unix seconds: Redis' clock without jumps."""

    async def close(self) -> None: ...


class WorkerQueue(Protocol):
    """Worker's side. Jobs are the worker's for `lease_s` after each `renew`; then others may take them over, and its
    writes are refused."""

    @property
    def lease_s(self) -> float: ...

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget = UNLIMITED_BUDGET) -> Sequence[Claim]:
        """Claim up to `max_branches` within `budget`, previously claimed jobs first, waiting `wait_s` for one. Ends
        jobs that are cancelled, expired, deadly or without their history. For one task at a time."""

    async def fetch_suspect(self) -> Claim | None:
        """Claim a suspect, if any."""

    def stop_fetching(self) -> None:
        """Stop `fetch` from claiming more, including a job it is waiting for."""

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        """Write a step's events in one atomic round trip; an `end` settles its job. Return jobs lost to others, for
        which nothing was written. Repeatable after QueueUnavailable."""

    async def renew(self) -> Lease:
        """Renew the lease while the engine makes progress."""

    async def take_over(self) -> int:
        """Put dead workers' jobs at the head and return their number; end expired jobs. Before the first fetch, a
        predecessor of the same name is dead."""

    async def hand_back(self, job_ids: Collection[str], cause: str | None = None) -> None:
        """Return our jobs to the queue. `cause`: of the engine's death."""

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        """Return the cancels since the last call or opening."""

    async def now_s(self) -> float:
        """Return queue time, Unix seconds."""

    async def announce(self, card: WorkerCard) -> bool:
        """Write our card; return whether block maps are requested."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Return fresh cards."""

    async def retire(self, worker_id: str) -> None:
        """Drop the card and the lease."""

    async def close(self) -> None: ...

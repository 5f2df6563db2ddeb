"""The queue between gateways and workers. service/queue/redis implements it, tests/fakes/queue in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from service.queue.job_cost import LANES
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.records import (
    UNLIMITED,
    Batch,
    Move,
    MovedLines,
    OpenBatch,
    StorageLimits,
    StoredFile,
    StoredResponse,
)


class QueueUnavailable(Exception):
    """The queue cannot be reached or takes no writes; nothing was written, unless this is an OutcomeUnknown."""


class OutcomeUnknown(QueueUnavailable):
    """The queue did not answer: the call may take effect. Repeat it under the same id."""


SUSPECT_AFTER_DEATHS = 2
MAX_DEATHS = 3
"""Crashes without progress: after 2 the job runs alone, after 3 it is dead-lettered; after 4 if engines also died
without it, meanwhile or within NEAR_DEATHS_S before."""
NEAR_DEATHS_S = 30.0
PROGRESS_EVENTS = 3
"""Progress is 3 events: a job that crashes every decode still emits a token per attempt, from its prefill. A suspect
with progress goes back to the queue and runs with others."""
MAX_DEATHS_IN_ALL = 6
"""Crashes with progress; before the last two the job runs alone to its end."""
ALONE_FOR_EVENTS = {"": 0, "suspect": PROGRESS_EVENTS, "recurrent": 1 << 62}
"""Standing -> number of events that the job emits alone in the engine."""


@dataclass(frozen=True)
class Claim:
    """A job claimed by a worker. `attempt` counts claims from 1 and fences off earlier owners."""

    job: Job
    attempt: int
    alone_for_events: int = 0  # number of events that it emits alone in the engine
    history: tuple[Event, ...] = ()  # of earlier attempts: numbers 1, 2, 3, ..., none with `end`
    stops: tuple[Cancel, ...] = ()  # cancelled branches

    @property
    def is_suspect(self) -> bool:
        return self.alone_for_events > 0


@dataclass(frozen=True, kw_only=True)
class ClaimBudget:
    """The work that a worker can start now. Jobs are claimed while any budget is left, so that the last one may exceed
    it and no job is too large for ever. With none left, tenants within their shares (service/fair_share.py) still
    reclaim slots from those beyond."""

    num_tokens: int | None = None  # of prompts and histories; None: no limit
    num_reserved: int = 0  # branches for tenants within their shares
    num_slots: int = 0  # that tenants share; 0: reclaim nothing
    slots_by_tenant: Mapping[str, int] = field(default_factory=dict)  # in use
    num_tenants: int = 1  # that share the slots, recent ones included
    num_reclaimable_tokens: int = 0  # like `num_tokens`, if all running jobs were preempted

    def is_restricted(self, max_branches: int) -> bool:
        """Return whether jobs may wait that this budget does not allow."""
        return max_branches <= self.num_reserved or (self.num_tokens is not None and self.num_tokens <= 0)


UNLIMITED_BUDGET = ClaimBudget()


@dataclass(frozen=True)
class Lease:
    """The answer to a heartbeat."""

    lost: frozenset[str]  # jobs that other workers own now
    runs_suspects: bool  # this worker runs the suspects, one at a time


@dataclass(frozen=True)
class IngressEntry:
    """An unvalidated entry of a producer's ingress stream."""

    producer: str
    entry_id: str
    payload: bytes
    was_left: bool = False  # by a gateway that is gone and may have replied in part


class Standing(Enum):
    """The state of the reply stream of a fetched entry."""

    OURS = 1  # the entry's
    TAKEN = 0  # the entry's, held by another gateway
    REPEATED = -1  # an earlier entry's with the same message
    IN_USE = -2  # an unfinished earlier entry's with another message


@dataclass(frozen=True)
class ReplyStream:
    standing: Standing
    replies: Sequence[bytes] = ()  # so far, if OURS; numbers 1, 2, 3, ...


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of what waits; None: no limit. Tokens are job_cost.cost_of."""

    max_jobs: int | None = None
    max_tokens: int | None = None
    max_tokens_per_tenant: int | None = None


UNBOUNDED = Bounds()


@dataclass(eq=False)
class QueueFull(Exception):
    """The job was refused: the backlog, of all tenants or of its own, is at its limit."""

    of_tenant: bool
    num_jobs: int
    num_tokens: int


@dataclass(frozen=True)
class Backlog:
    """Jobs that wait to be claimed."""

    num_jobs: int
    num_tokens: int
    num_own_tokens: int  # of the given tenant


RETURNED, SUSPECT = "returned", "suspect"
QUEUE_LANES = (*LANES, RETURNED, SUSPECT)
"""The queues of waiting jobs: never claimed, by lane; claimed before; suspects."""


@dataclass(frozen=True)
class Lane:
    """The jobs of one of QUEUE_LANES."""

    num_jobs: int
    oldest_at_s: float | None  # queue time since which its first job waits


@dataclass(frozen=True)
class QueueState:
    lanes: Mapping[str, Lane]
    num_leases: int  # of workers, not expired

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_jobs for lane in self.lanes.values())


class BatchStore(Protocol):
    """Files and batches, kept for FILE_TTL_S and charged to their tenant. An invalid id raises ValueError."""

    async def reserve_file(self, file_id: str, tenant: str, num_bytes: int, limits: StorageLimits) -> None:
        """Charge for a file before it is written, for UPLOAD_TTL_S. Raises StorageFull."""

    async def append_file(
        self, file_id: str, tenant: str, data: bytes, limits: StorageLimits = UNLIMITED, *, is_reserved: bool = False
    ) -> int:
        """Append a piece, charged unless it `is_reserved`; return the number of pieces. The file expires UPLOAD_TTL_S
        after its last piece without `put_file`. Raises StorageFull."""

    async def put_file(self, file: StoredFile) -> None:
        """Keep a file whose pieces are written."""

    async def get_file(self, file_id: str) -> StoredFile | None: ...

    async def file_pieces(self, file_id: str, first: int, count: int) -> Sequence[bytes]:
        """Return at most `count` pieces; none if the file is missing."""

    async def list_files(self, tenant: str) -> Sequence[StoredFile]:
        """Return the tenant's files, newest first."""

    async def drop_file(self, file_id: str, tenant: str) -> None:
        """Drop a file, finished or not."""

    async def put_batch(self, batch: Batch, limits: StorageLimits = UNLIMITED) -> None:
        """Write a batch. Raises StorageFull if limits are given, for a new one."""

    async def get_batch(self, batch_id: str) -> Batch | None: ...

    async def list_batches(self, tenant: str, after: str | None, count: int) -> Sequence[Batch]:
        """Return the tenant's next `count` batches after `after`, newest first."""

    async def open_batches(self) -> Sequence[OpenBatch]:
        """Return all tenants' open batches, oldest first."""

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        """Take or renew the batch's lock for `for_s`; return False if another holder has it."""

    async def cancel_batch(self, batch_id: str) -> None:
        """Mark the batch as cancelled for its holder."""

    async def is_batch_cancelled(self, batch_id: str) -> bool: ...

    async def reserve_lines(self, batch: Batch, num_bytes: int, limits: StorageLimits) -> None:
        """Charge at least `num_bytes` for the batch's answers. Raises StorageFull."""

    async def put_line(
        self, batch: Batch, number: int, line: bytes, mark: bytes, limits: StorageLimits = UNLIMITED
    ) -> None:
        """Write a line's answer, marked ANSWERED_WELL or ANSWERED_BADLY; the first stays. Raises StorageFull."""

    async def line_marks(self, batch_id: str) -> bytes:
        """Return a byte per line up to the last answered one."""

    async def line_sizes(self, batch_id: str, first: int, count: int) -> Sequence[int]:
        """Return the bytes of answers; 0 for a missing one."""

    async def lines(self, batch_id: str, first: int, count: int) -> Sequence[bytes | None]: ...

    async def moved_lines(self, batch_id: str) -> MovedLines: ...

    async def move_lines(self, batch: Batch, move: Move) -> int:
        """Move answers to their batch's files, atomically, once; return the first line not moved."""

    async def drop_lines(self, batch: Batch) -> None:
        """Drop the moved answers and their charge, before the batch is put as ended."""


class ResponseStore(Protocol):
    """Responses. An invalid id raises ValueError."""

    async def put_response(self, record: StoredResponse, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        """Keep the record for `for_s`. Raises StorageFull."""

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        """Replace a record that was not dropped; never refused, as its tokens are spent."""

    async def get_response(self, response_id: str) -> StoredResponse | None: ...

    async def drop_response(self, record: StoredResponse) -> None: ...


class RequestStore(Protocol):
    """Records of accepted requests, so that any gateway can answer or end them."""

    async def put_request(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        """Keep a record until LOG_ENDED_TTL_S after its deadline and return its id; or, if a kept record has the same
        `idempotency` (a hash), return that one's id. Raises StorageFull."""

    async def get_request(self, request_id: str) -> RequestRecord | None:
        """Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def drop_request(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        """Drop a record and its idempotency key, unless the job `unless_there` was accepted."""

    async def mark_watched(self, request_id: str, for_s: float) -> None:
        """Mark for `for_s` that a client waits for the request."""

    async def is_watched(self, request_id: str) -> bool: ...


class IngressQueue(Protocol):
    """Entries of foreign producers and the replies to them. A gateway renews its entries every INGRESS_KEEP_S; another
    gets one that was not renewed for INGRESS_LEFT_S."""

    async def fetch_entries(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        """Return new entries, each to one gateway."""

    async def renew_entries(self) -> Sequence[IngressEntry]:
        """Renew the fetched entries; return the ones that another gateway has."""

    async def begin_replies(self, entry: IngressEntry, reply_id: str) -> ReplyStream:
        """Take the producer's reply stream `reply_id` for an entry fetched here."""

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        """Append reply `number` once, and none after the last; return False if another gateway has the entry."""

    async def settle_entry(self, entry: IngressEntry) -> None:
        """Remove an entry that has its final reply."""

    def release_entry(self, entry: IngressEntry) -> None:
        """Stop renewing the entry."""


class EventStream(Protocol):
    """A job's events; may be closed before its end."""

    def __aiter__(self) -> EventStream: ...

    def __anext__(self) -> Awaitable[Event]: ...

    async def aclose(self) -> None: ...


class GatewayQueue(Protocol):
    """The queue as a gateway uses it."""

    @property
    def batches(self) -> BatchStore: ...

    @property
    def responses(self) -> ResponseStore: ...

    @property
    def requests(self) -> RequestStore: ...

    @property
    def ingress(self) -> IngressQueue: ...

    async def submit(
        self,
        job: Job,
        bounds: Bounds = UNBOUNDED,
        record: RequestRecord | None = None,
        limits: StorageLimits = UNLIMITED,
    ) -> None:
        """Accept a job, once, and atomically its request's `record`; one that does not outlive its client is left out
        beyond `limits`. Raises QueueFull, StorageFull, QueueUnavailable, OutcomeUnknown if the job may have been
        accepted, or WireError if it is too large."""

    async def backlog(self, tenant: str) -> Backlog: ...

    async def queue_position(self, job_id: str) -> int | None:
        """Return how many of its tenant's jobs precede a waiting job, else None."""

    def follow(self, job_id: str, after: int = 0) -> EventStream:
        """Iterate over the job's events after number `after`, in order, each once, to its end; cheapest if called
        before `submit`. Outages are waited out, and a lost job ends with LOST; iterating raises QueueUnavailable only
        for a log with a gap or a closed queue. Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        """Return the last event of each job's log."""

    async def cancel(self, cancel: Cancel) -> None:
        """End a waiting job or send the cancel to its worker; keep it for a job not submitted yet."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Return the cards of workers with a fresh heartbeat."""

    async def request_block_maps(self) -> None:
        """Have workers put block maps on their cards for LOOKED_AT_TTL_S."""

    async def queue_state(self) -> QueueState: ...

    async def now_s(self) -> float:
        """Return queue time, Unix seconds (Redis' clock without jumps)."""

    async def close(self) -> None: ...


class WorkerQueue(Protocol):
    """The queue as a worker uses it. It owns its jobs for `lease_s` after each `renew`; then another worker may take
    them over, and nothing this one writes counts."""

    @property
    def lease_s(self) -> float: ...

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget = UNLIMITED_BUDGET) -> Sequence[Claim]:
        """Claim jobs of up to `max_branches` within `budget`, waiting `wait_s` for the first; jobs claimed before come
        first. A job that is cancelled, past its deadline, deadly or without its history is ended instead. For one task
        at a time."""

    async def fetch_suspect(self) -> Claim | None:
        """Claim a suspect, to run alone."""

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        """Write a step's events in one atomic round trip; an `end` settles its job. Return the jobs that are not ours
        any more, of which nothing was written. Repeatable after QueueUnavailable: no number is written twice."""

    async def renew(self) -> Lease:
        """Renew the lease, only while the engine makes progress."""

    async def take_over(self) -> int:
        """Put the jobs of dead workers at the queue's head and return their number; end waiting jobs past their
        deadline. Before the first fetch a predecessor of the same name is dead."""

    async def hand_back(self, job_ids: Collection[str], cause: str | None = None) -> None:
        """Return our jobs to the queue. `cause`: what the engine died of while they were in flight."""

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        """Return the cancels since the last call, or since opening."""

    async def now_s(self) -> float:
        """Return queue time, Unix seconds (Redis' clock without jumps)."""

    async def announce(self, card: WorkerCard) -> bool:
        """Write this worker's card; return whether block maps are requested."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Return the cards of workers with a fresh heartbeat."""

    async def retire(self, worker_id: str) -> None:
        """Drop the card and the lease."""

    async def close(self) -> None: ...

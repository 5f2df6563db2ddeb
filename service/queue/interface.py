"""The queue between gateways and workers, as both use it.

A gateway holds a `GatewayQueue` and its stores, a worker a `WorkerQueue`. `service/queue/redis` implements them on
Redis, `tests/fakes/queue` in memory; one set of contract tests runs on both.
"""

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
    """The queue cannot be reached or takes no writes now; try again later. Nothing was written, unless this is an
    OutcomeUnknown."""


class OutcomeUnknown(QueueUnavailable):
    """The queue did not answer: the call may have taken effect, or may still do so. Repeat it under the same id; it is
    not a refusal."""


SUSPECT_AFTER_DEATHS = 2
MAX_DEATHS = 3
"""Engine deaths while a job was in flight and made no progress: after 2 it runs alone, after 3 it is dead-lettered;
after 4 if engines also died without it meanwhile or within NEAR_DEATHS_S before, which points to another cause."""
NEAR_DEATHS_S = 30.0
PROGRESS_EVENTS = 3
"""Progress is 3 events: a job that crashes every decode still emits one token per attempt, from its prefill. A suspect
that makes progress stops being one: it is returned to the queue and runs beside other jobs."""
MAX_DEATHS_IN_ALL = 6
"""Engine deaths of a job that does make progress: it runs alone, to its end, before the last two."""
ALONE_FOR_EVENTS = {"": 0, "suspect": PROGRESS_EVENTS, "recurrent": 1 << 62}
"""By a job's standing, the number of events it emits with no other job in the engine."""


@dataclass(frozen=True)
class Claim:
    """A job claimed by one worker. `attempt` counts claims from 1 and fences off earlier owners."""

    job: Job
    attempt: int
    alone_for_events: int = 0  # engines died of it: it emits this many events with no other job in the engine
    history: tuple[Event, ...] = ()  # events of earlier attempts: numbers 1, 2, 3, ... without gap, none with `end`
    stops: tuple[Cancel, ...] = ()  # cancelled branches

    @property
    def is_suspect(self) -> bool:
        return self.alone_for_events > 0


@dataclass(frozen=True, kw_only=True)
class ClaimBudget:
    """What a worker can start now, besides the number of branches. Jobs are claimed while any budget is left, so the
    last one may exceed it: otherwise a job larger than every worker would block the queue.

    Slots that tenants use beyond their shares (see service/fair_share.py) can be reclaimed: with no budget left, jobs
    of other tenants are still claimed, as far as these stay within their own shares.
    """

    num_tokens: int | None = None  # of prompts and histories; None: no limit
    num_reserved: int = 0  # of the branches: only for tenants within their shares
    num_slots: int = 0  # branches that tenants share; 0: nothing is reclaimed
    slots_by_tenant: Mapping[str, int] = field(default_factory=dict)  # in use
    num_tenants: int = 1  # that share the slots, recent ones that neither run nor wait included
    num_reclaimable_tokens: int = 0  # like `num_tokens`, if all running jobs were preempted

    def is_restricted(self, max_branches: int) -> bool:
        """Return whether only some tenants' jobs may be claimed, so that jobs may wait and none be claimable."""
        return max_branches <= self.num_reserved or (self.num_tokens is not None and self.num_tokens <= 0)


UNLIMITED_BUDGET = ClaimBudget()


@dataclass(frozen=True)
class Lease:
    """The queue's answer to a worker's heartbeat."""

    lost: frozenset[str]  # jobs that other workers own now: publish nothing of them
    runs_suspects: bool  # this worker runs the suspects now, one at a time


@dataclass(frozen=True)
class IngressEntry:
    """A raw, unvalidated entry of a producer's ingress stream."""

    producer: str
    entry_id: str
    payload: bytes
    was_left: bool = False  # by a gateway that is gone and may have replied in part


class Standing(Enum):
    """The state of the reply stream of a fetched entry."""

    OURS = 1  # the entry's
    TAKEN = 0  # the entry's, which another gateway holds by now
    REPEATED = -1  # an earlier entry's with the same message: its producer wrote it twice
    IN_USE = -2  # an earlier entry's with another message, whose last reply is missing


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
    """The job was not accepted: the backlog, of all tenants or of the job's, is at its limit."""

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
"""Where unclaimed jobs wait: those never claimed, by lane; those claimed before; of these the ones that run alone."""


@dataclass(frozen=True)
class Lane:
    """The jobs of one of QUEUE_LANES."""

    num_jobs: int
    oldest_at_s: float | None  # queue time since which its first job waits; None: it is empty


@dataclass(frozen=True)
class QueueState:
    lanes: Mapping[str, Lane]
    num_leases: int  # of workers, not expired

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_jobs for lane in self.lanes.values())


class BatchStore(Protocol):
    """Files and batches. They are kept for FILE_TTL_S and charged to their tenant. An id that no key may contain raises
    ValueError."""

    async def reserve_file(self, file_id: str, tenant: str, num_bytes: int, limits: StorageLimits) -> None:
        """Charge for a file before it is written, for UPLOAD_TTL_S. Raises StorageFull."""

    async def append_file(
        self, file_id: str, tenant: str, data: bytes, limits: StorageLimits = UNLIMITED, *, is_reserved: bool = False
    ) -> int:
        """Append a piece, charged unless it `is_reserved`, and return the number of pieces. The file expires
        UPLOAD_TTL_S after its last piece, unless `put_file` follows. Raises StorageFull."""

    async def put_file(self, file: StoredFile) -> None:
        """Keep a file whose pieces are written."""

    async def get_file(self, file_id: str) -> StoredFile | None: ...

    async def file_pieces(self, file_id: str, first: int, count: int) -> Sequence[bytes]:
        """Return at most `count` pieces; none of a missing file."""

    async def list_files(self, tenant: str) -> Sequence[StoredFile]:
        """Return the tenant's files, newest first."""

    async def drop_file(self, file_id: str, tenant: str) -> None:
        """Drop a file, also one still being written."""

    async def put_batch(self, batch: Batch, limits: StorageLimits = UNLIMITED) -> None:
        """Write a batch. Raises StorageFull if limits are given, for a new one."""

    async def get_batch(self, batch_id: str) -> Batch | None: ...

    async def list_batches(self, tenant: str, after: str | None, count: int) -> Sequence[Batch]:
        """Return at most `count` of the tenant's batches, newest first, from the one following `after`."""

    async def open_batches(self) -> Sequence[OpenBatch]:
        """Return all tenants' open batches, oldest first."""

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        """Take or renew the batch's lock for `for_s`; return False if another holder has it."""

    async def cancel_batch(self, batch_id: str) -> None:
        """Mark the batch as cancelled, for its holder to see."""

    async def is_batch_cancelled(self, batch_id: str) -> bool: ...

    async def reserve_lines(self, batch: Batch, num_bytes: int, limits: StorageLimits) -> None:
        """Charge at least `num_bytes` for the batch's answers. Raises StorageFull."""

    async def put_line(
        self, batch: Batch, number: int, line: bytes, mark: bytes, limits: StorageLimits = UNLIMITED
    ) -> None:
        """Write the answer to an input line, ANSWERED_WELL or ANSWERED_BADLY; the first answer stays. Raises
        StorageFull."""

    async def line_marks(self, batch_id: str) -> bytes:
        """Return a byte for each line, up to the last answered one."""

    async def line_sizes(self, batch_id: str, first: int, count: int) -> Sequence[int]:
        """Return the bytes of answers; 0 for a missing one."""

    async def lines(self, batch_id: str, first: int, count: int) -> Sequence[bytes | None]: ...

    async def moved_lines(self, batch_id: str) -> MovedLines: ...

    async def move_lines(self, batch: Batch, move: Move) -> int:
        """Move answers to the files of their batch, atomically and once; return the first line not moved yet."""

    async def drop_lines(self, batch: Batch) -> None:
        """Drop the moved answers and their charge. Call it before the batch is put as ended."""


class ResponseStore(Protocol):
    """Responses. An id that no key may contain raises ValueError."""

    async def put_response(self, record: StoredResponse, for_s: float, limits: StorageLimits = UNLIMITED) -> None:
        """Keep the record for `for_s`. Raises StorageFull."""

    async def settle_response(self, record: StoredResponse, for_s: float) -> None:
        """Replace the record by its ended form, unless it was dropped. Never refused: its tokens are spent."""

    async def get_response(self, response_id: str) -> StoredResponse | None: ...

    async def drop_response(self, record: StoredResponse) -> None: ...


class RequestStore(Protocol):
    """Records of accepted requests, so that any gateway can answer or end them."""

    async def put_request(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        """Keep a record until LOG_ENDED_TTL_S after its deadline and return its id. If an earlier request has the same
        `idempotency` (a hash) and its record exists, keep nothing and return that id. Raises StorageFull."""

    async def get_request(self, request_id: str) -> RequestRecord | None:
        """Return the record, None if it expired. Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def drop_request(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        """Drop the record of a request that was not accepted, and its idempotency key unless another request has it.
        Does nothing if the job `unless_there` was accepted."""

    async def mark_watched(self, request_id: str, for_s: float) -> None:
        """Mark for `for_s` that a client waits for the request."""

    async def is_watched(self, request_id: str) -> bool: ...


class IngressQueue(Protocol):
    """Entries that foreign producers write, and the replies to them. A gateway says every INGRESS_KEEP_S that it still
    works on its entries; one not renewed for INGRESS_LEFT_S goes to another gateway."""

    async def fetch_entries(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        """Return new entries of these producers' streams, each to one gateway."""

    async def renew_entries(self) -> Sequence[IngressEntry]:
        """Keep the fetched entries; return those that another gateway has taken."""

    async def begin_replies(self, entry: IngressEntry, reply_id: str) -> ReplyStream:
        """Take the producer's reply stream `reply_id` for an entry fetched here."""

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        """Append reply `number` to the stream from `begin_replies`, once: a repeated number, or one after the last
        reply, changes nothing. Return False, and write nothing, if another gateway has the entry."""

    async def settle_entry(self, entry: IngressEntry) -> None:
        """Remove an entry that has its final reply."""

    def release_entry(self, entry: IngressEntry) -> None:
        """Stop keeping the entry: unless settled, another gateway gets it INGRESS_LEFT_S after its last renewal."""


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
        """Accept a job; a second time changes nothing. The `record` of its request is stored in the same atomic act;
        one that does not outlive its client is left out if it exceeds `limits`. A lost answer is asked for again for a
        few seconds. Raises QueueFull, StorageFull, QueueUnavailable, OutcomeUnknown if the job may have been accepted,
        or WireError if it is too large."""

    async def backlog(self, tenant: str) -> Backlog: ...

    async def queue_position(self, job_id: str) -> int | None:
        """Return how many of its tenant's jobs precede a waiting one; None for one that does not wait."""

    def follow(self, job_id: str, after: int = 0) -> EventStream:
        """Return an iterator over the job's events with numbers above `after`, in order, each once, up to the one with
        `end`. Events are live from this call on; calling it before `submit` is cheapest. Outages are waited out, and a
        job that the queue lost ends with LOST; iterating raises QueueUnavailable only for a log with a gap and when
        the queue is closed. Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        """Return by job the last event of its log, None without one."""

    async def cancel(self, cancel: Cancel) -> None:
        """End a waiting job, or send the cancel to the worker that runs it. It is kept for a job not submitted yet."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Return the cards of workers whose heartbeat is fresh."""

    async def request_block_maps(self) -> None:
        """Ask the workers to put their block maps on their cards for LOOKED_AT_TTL_S."""

    async def queue_state(self) -> QueueState: ...

    async def now_s(self) -> float:
        """Return queue time, Unix seconds: Redis' clock without its jumps."""

    async def close(self) -> None: ...


class WorkerQueue(Protocol):
    """The queue as a worker uses it. A worker owns its jobs while its lease runs, `lease_s` from each `renew`; once it
    has expired another worker may take them over, and nothing this one writes counts."""

    @property
    def lease_s(self) -> float: ...

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget = UNLIMITED_BUDGET) -> Sequence[Claim]:
        """Claim jobs of up to `max_branches` (0 or less: none is free) within `budget`, waiting at most `wait_s` for
        the first; jobs claimed before come first. A job that was cancelled in the queue, is past its deadline, is
        deadly or has lost its history is ended, not returned. For one task at a time."""

    async def fetch_suspect(self) -> Claim | None:
        """Claim a job that may have crashed engines, to run alone; None if there is none."""

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        """Write all events of a step in one round trip. An event with `end` settles its job in the same atomic act.
        Return the jobs that are not ours any more: nothing of them was written. After QueueUnavailable the same events
        may be published again: no number is written twice."""

    async def renew(self) -> Lease:
        """Renew the lease, only while the engine makes progress."""

    async def take_over(self) -> int:
        """Return the jobs of dead workers to the head of the queue, end waiting jobs past their deadline, and return
        the number of the former. A call before the first fetch includes the jobs of a predecessor of the same name."""

    async def hand_back(self, job_ids: Collection[str], cause: str | None = None) -> None:
        """Return jobs to the queue with their events. `cause`: what the engine died of while they were in flight.
        Jobs that are not ours are skipped."""

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        """Return the cancels since the last call (since this queue was opened, at first)."""

    async def now_s(self) -> float:
        """Return queue time, Unix seconds: Redis' clock without its jumps."""

    async def announce(self, card: WorkerCard) -> bool:
        """Publish this worker's card; return whether `card.blocks` is requested."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Return the cards of workers whose heartbeat is fresh."""

    async def retire(self, worker_id: str) -> None:
        """Drop the card and the lease: the worker leaves."""

    async def close(self) -> None: ...

"""What the house asks of the queue between doors and workers. `redis_queue` and `memory_queue` keep it alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from service.queue.batches import BatchStore
from service.queue.job_cost import LANES
from service.queue.messages import Cancel, Event, Job, RequestRecord, WorkerCard
from service.queue.responses import ResponseStore
from service.queue.storage import UNLIMITED, StorageLimits


class QueueUnavailable(Exception):
    """The queue cannot be reached or takes no writes now. Try again later. Unless it is an OutcomeUnknown, nothing was
    written."""


class OutcomeUnknown(QueueUnavailable):
    """The queue was asked and did not answer: what was asked may have happened, or may still happen. Ask again under
    the same id, or leave it for a later retry; it is not a refusal."""


SUSPECT_AFTER_DEATHS = 2
MAX_DEATHS = 3
"""Engine deaths that a job may be in flight at without getting any further between them: after the second it runs
alone, after the third it is buried; after one more where engines died without it meanwhile or shortly before, for then
there is another cause about."""
NEAR_DEATHS_S = 30.0
"""An engine that died so shortly before a job was first in flight at a death speaks for it: there is another cause."""
GETS_ON_BY_EVENTS = 3
"""A job that kills at every decode still tells a token a life, from the prefill with which it is taken up. A suspect
that gets on is none any more: it is given back, and goes on beside others."""
MAX_DEATHS_IN_ALL = 6
"""The same for one that does get further: it runs alone before the last two, to its end."""
ALONE_FOR_EVENTS = {"": 0, "suspect": GETS_ON_BY_EVENTS, "recurrent": 1 << 62}
"""By a job's standing, what it has to tell with no other beside it."""


@dataclass(frozen=True)
class Claim:
    """A job in the hands of one worker. `attempt` counts claims from 1 and fences earlier owners out."""

    job: Job
    attempt: int
    alone_for_events: int = 0  # engines died while it was in flight: it has to tell so many with no other beside it
    history: tuple[Event, ...] = ()  # what earlier owners told: numbers 1, 2, 3, ... without gap, none with `end`
    stops: tuple[Cancel, ...] = ()  # branches that are no longer wanted

    @property
    def is_suspect(self) -> bool:
        return self.alone_for_events > 0


@dataclass(frozen=True, kw_only=True)
class ClaimBudget:
    """What a worker can begin now, beside the number of branches. Jobs are claimed as long as some is left, so that the
    last one may be larger: none that is too large for a worker blocks its queue for ever.

    What tenants hold beyond their shares of the worker's places (see service/fair_share.py) is lent to them: where no
    room is left, jobs of others are claimed all the same, as far as they keep to their own shares.
    """

    num_tokens: int | None = None  # of prompts, and of what was told before; None: as many as come
    num_reserved: int = 0  # of the branches: only for tenants that keep to their shares
    num_slots: int = 0  # that tenants share, in branches; 0: nothing is lent
    slots_by_tenant: Mapping[str, int] = field(default_factory=dict)  # of the places, by tenant that has any
    num_tenants: int = 1  # that share them: some of them were here lately, and neither hold any nor wait
    num_reclaimable_tokens: int = 0  # like `num_tokens`, of what would be free if all that runs had to leave

    def is_restricted(self, max_branches: int) -> bool:
        """Whether so many branches are not for everybody: jobs may wait, and be none to claim."""
        return max_branches <= self.num_reserved or (self.num_tokens is not None and self.num_tokens <= 0)


UNLIMITED_BUDGET = ClaimBudget()


@dataclass(frozen=True)
class Lease:
    """What a worker learns from its heartbeat."""

    lost: frozenset[str]  # jobs that are not its own any more: others have them, nothing of them may be told
    runs_suspects: bool  # it is the one to run suspects now, each alone


@dataclass(frozen=True)
class IngressEntry:
    """A raw, unvalidated entry of a producer's ingress stream."""

    producer: str
    entry_id: str
    payload: bytes
    was_left: bool = False  # by a gateway that is gone; it may have replied in part


class Standing(Enum):
    """Whose a reply stream is, as the gateway hears that has fetched an entry."""

    OURS = 1  # the entry's
    TAKEN = 0  # the entry's, which another gateway has by now
    REPEATED = -1  # an earlier entry's with the same message: its producer has written it twice
    IN_USE = -2  # an earlier entry's, with another message, whose last reply is not there yet


@dataclass(frozen=True)
class ReplyStream:
    standing: Standing
    replies: Sequence[bytes] = ()  # so far, where it is OURS; numbers 1, 2, 3, ...


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much may wait; None: as much as comes. Tokens are what jobs may cost (job_cost.cost_of)."""

    max_jobs: int | None = None
    max_tokens: int | None = None
    max_tokens_per_tenant: int | None = None


UNBOUNDED = Bounds()


@dataclass(eq=False)
class QueueFull(Exception):
    """No room for a job now: nothing was accepted. Tells what waits already, of all or of the job's tenant."""

    of_tenant: bool
    num_jobs: int
    num_tokens: int


@dataclass(frozen=True)
class Backlog:
    """What waits to be claimed."""

    num_jobs: int
    num_tokens: int
    num_own_tokens: int  # of the tenant that was asked about


RETURNED, SUSPECT = "returned", "suspect"
QUEUE_LANES = (*LANES, RETURNED, SUSPECT)
"""Where jobs wait that no worker has: those that none ever had, those that one died with or gave back, and of these
those that run alone."""


@dataclass(frozen=True)
class Lane:
    """The jobs of one of QUEUE_LANES."""

    num_jobs: int
    oldest_at_s: float | None  # queue time since which the first of them has been waiting there; None where none does


@dataclass(frozen=True)
class QueueState:
    """What waits to be claimed, and who may claim it."""

    lanes: Mapping[str, Lane]
    num_leases: int  # of workers, that run

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_jobs for lane in self.lanes.values())


class GatewayQueue(BatchStore, ResponseStore, Protocol):
    """The half that gateways use."""

    async def submit(
        self,
        job: Job,
        bounds: Bounds = UNBOUNDED,
        record: RequestRecord | None = None,
        limits: StorageLimits = UNLIMITED,
    ) -> None:
        """The job is accepted when this returns; a second time changes nothing. With it, in the same atomic act, the
        `record` of its request is kept as by `remember`; one that does not outlive its client is left out where there
        is no room for it. A lost answer is asked for again under the same id, for a few seconds. Raises QueueFull,
        StorageFull, QueueUnavailable, OutcomeUnknown where the job may have been accepted, or WireError for one that
        is too large."""

    async def backlog(self, tenant: str) -> Backlog:
        """What waits, and what of it is this tenant's."""

    async def place(self, job_id: str) -> int | None:
        """How many of its tenant's own jobs go before a waiting one; None for one that does not wait."""

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The job's events with numbers above `after`, in order, each once; ends behind the one that has `end`.
        Events are live from the moment `follow` is called (not from the first iteration); calling it before `submit`
        is cheapest. Outages are waited out, and a job that the queue has lost ends with LOST; iterating raises
        QueueUnavailable only for a log with a hole, and when the queue is closed. Raises ValueError for an id
        outside [A-Za-z0-9_.-]{1,128}."""

    async def cancel(self, cancel: Cancel) -> None:
        """A job that is queued ends here; the worker of one that runs is told, and whoever takes it over. For one that
        is still to come it is remembered."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Cards of the workers whose heartbeat is fresh."""

    async def look(self) -> None:
        """Asks the workers to show their blocks on their cards for a while."""

    async def queue_state(self) -> QueueState:
        """How many jobs wait in each of QUEUE_LANES, and since when."""

    async def now_s(self) -> float:
        """Queue time, Unix seconds: Redis' clock without its jumps."""

    async def fetch_ingress(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        """New entries of these producers' streams, each to one gateway only."""

    async def keep_ingress(self) -> Sequence[IngressEntry]:
        """Say that the fetched entries are still worked on, every INGRESS_KEEP_S: those of which nobody says so for
        INGRESS_LEFT_S go to another gateway. Returns entries that have gone there."""

    async def begin_replies(self, entry: IngressEntry, reply_id: str) -> ReplyStream:
        """The entry, which was fetched here, is going to be answered in the reply stream `reply_id` of its producer."""

    async def settle_ingress(self, entry: IngressEntry) -> None:
        """The entry has its final reply and is removed."""

    def leave_ingress(self, entry: IngressEntry) -> None:
        """Nobody works on the entry here any more. Unless it is settled, it goes to whoever asks INGRESS_LEFT_S after
        the last word of it."""

    async def reply(
        self, entry: IngressEntry, reply_id: str, number: int, payload: bytes, *, is_last: bool = False
    ) -> bool:
        """Append reply `number` to the stream that `begin_replies` gave the entry, once: a second write of a number, or
        one behind the last reply, changes nothing. The stream lives a while after the last write. False: nothing was
        written, for the entry is another gateway's now."""

    async def remember(
        self, record: RequestRecord, idempotency: str | None = None, limits: StorageLimits = UNLIMITED
    ) -> str:
        """Keep a record until LOG_ENDED_TTL_S after its deadline. Where another request came first under the same
        `idempotency` (a hash) and its record is there, nothing is kept and that one's id is returned, else the record's
        own. Raises StorageFull."""

    async def recall(self, request_id: str) -> RequestRecord | None:
        """The record, while it is kept. Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def forget(
        self, request_id: str, tenant: str, idempotency: str | None = None, unless_there: str | None = None
    ) -> None:
        """Take the record away, and its idempotency key unless another request has it by now: the request was not
        accepted after all. Nothing happens where `unless_there`, one of its jobs, was accepted."""

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        """By job, the last event that stands in its log; None where none does."""

    async def watch(self, request_id: str, for_s: float) -> None:
        """Somebody waits for the request now; the mark stays `for_s` seconds."""

    async def is_watched(self, request_id: str) -> bool:
        """Whether the mark of a `watch` is there."""

    async def close(self) -> None: ...


class WorkerQueue(Protocol):
    """The half that workers use. A worker's jobs are its own while its lease runs, `lease_s` from each `renew`; when it
    has run out, any other may take them over, and from then on nothing that this one writes counts."""

    lease_s: float

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget = UNLIMITED_BUDGET) -> Sequence[Claim]:
        """Claims of so many branches (0 or less: nothing is free), as far as `room` has it, waiting at most wait_s for
        the first; jobs that others had before come first. One that was cancelled while queued or is past its deadline
        is ended here and never returned, and so is one that kills engines, or whose past is lost. To be called by one
        task at a time."""

    async def fetch_suspect(self) -> Claim | None:
        """A job that may have killed engines, to be run with no other; none if there is none."""

    async def publish(self, events: Sequence[Event]) -> frozenset[str]:
        """One round trip for all events of a step. An event with `end` also settles its job: it leaves the queue in
        the same atomic act. Returns jobs that are not ours any more: of those nothing was written. Raises
        QueueUnavailable, in which case the same events may be published again: a number already written is not
        written twice."""

    async def renew(self) -> Lease:
        """The heartbeat of the lease, to be given only while the engine makes progress."""

    async def take_over(self) -> int:
        """Put the jobs of dead workers back in the queue, before all others, and end those that waited past their
        deadline. Before the first fetch also the jobs of a worker of our name that was here before. How many were
        put back."""

    async def hand_back(self, job_ids: Collection[str], cause: str | None = None) -> None:
        """Give jobs back, with what was told of them; other workers go on with them at once. `cause`: what the engine
        died of while they were in flight. Jobs that are not ours are left alone."""

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        """Cancels since the last call (since this queue was opened, at first)."""

    async def now_s(self) -> float:
        """Queue time, Unix seconds: Redis' clock without its jumps."""

    async def announce(self, card: WorkerCard) -> bool:
        """Tell the doors, and other workers, that this one is here. Returns whether somebody wants to see
        `card.blocks`."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Cards of the workers that were here in the last few seconds."""

    async def retire(self, worker_id: str) -> None:
        """Take the card away, and the lease: the worker leaves."""

    async def close(self) -> None: ...

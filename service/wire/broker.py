"""What the house asks of the queue between doors and workers. `redis_broker` and `memory_broker` keep it alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.wire.messages import Cancel, Event, Job, RequestRecord, WorkerCard


class BrokerUnavailable(Exception):
    """The queue cannot be reached or takes no writes now; nothing was accepted. Try again later."""


@dataclass(frozen=True)
class Claim:
    """A job in the hands of one worker. `attempt` counts deliveries from 1 and fences stale owners out."""

    job: Job
    attempt: int
    entry_id: str


@dataclass(frozen=True)
class IngressEntry:
    """A raw, unvalidated entry of a producer's ingress stream."""

    producer: str
    entry_id: str
    payload: bytes


class DoorBroker(Protocol):
    """The half that gateways use."""

    async def submit(self, job: Job) -> None:
        """The job is accepted when this returns. Raises BrokerUnavailable, or WireError for one that is too large."""

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The job's events with numbers above `after`, in order, each once; ends behind the one that has `end`.
        Events are live from the moment `follow` is called (not from the first iteration); calling it before `submit`
        is cheapest. Outages are waited out; iterating raises BrokerUnavailable only for what is lost for good, and when
        the broker is closed. Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def cancel(self, cancel: Cancel) -> None:
        """Told to every worker, and remembered for a job that is still queued."""

    async def workers(self) -> Sequence[WorkerCard]:
        """Cards of the workers whose heartbeat is fresh."""

    async def look(self) -> None:
        """Asks the workers to show their blocks on their cards for a while."""

    async def num_waiting(self) -> int:
        """Jobs that no worker has claimed yet."""

    async def now_s(self) -> float:
        """Redis time, Unix seconds."""

    async def fetch_ingress(self, producers: Sequence[str], max_entries: int, wait_s: float) -> Sequence[IngressEntry]:
        """New entries of these producers' streams, each to one gateway only."""

    async def settle_ingress(self, entry: IngressEntry) -> None:
        """The entry has its final reply and is removed."""

    async def reply(self, producer: str, producer_job_id: str, payload: bytes) -> None:
        """Append to the reply stream of (producer, producer_job_id); it lives a while after the last write."""

    async def remember(self, record: RequestRecord, idempotency: str | None = None) -> str:
        """Keep a record until LOG_ENDED_TTL_S after its deadline. Where another request came first under the same
        `idempotency` (a hash), nothing is kept and that one's id is returned, else the record's own."""

    async def recall(self, request_id: str) -> RequestRecord | None:
        """The record, while it is kept. Raises ValueError for an id outside [A-Za-z0-9_.-]{1,128}."""

    async def last_events(self, job_ids: Sequence[str]) -> Sequence[Event | None]:
        """By job, the last event that stands in its log; None where none does."""

    async def watch(self, request_id: str, for_s: float) -> None:
        """Somebody waits for the request now; the mark stays `for_s` seconds."""

    async def is_watched(self, request_id: str) -> bool:
        """Whether the mark of a `watch` is there."""

    async def close(self) -> None: ...


class WorkerBroker(Protocol):
    """The half that workers use."""

    async def fetch(self, max_jobs: int, wait_s: float) -> Sequence[Claim]:
        """Up to max_jobs claims, waiting at most wait_s for the first. A job cancelled while queued is ended here
        and never returned."""

    async def publish(self, events: Sequence[Event]) -> None:
        """One round trip for all events of a step. An event with `end` also settles its job: it leaves the queue in
        the same atomic act. Raises BrokerUnavailable, in which case the same events may be published again: a number
        already written is not written twice."""

    async def fetch_cancels(self, wait_s: float) -> Sequence[Cancel]:
        """Cancels since the last call (since this broker was opened, at first)."""

    async def now_s(self) -> float:
        """Redis time, Unix seconds."""

    async def announce(self, card: WorkerCard) -> bool:
        """The heartbeat. Returns whether somebody wants to see `card.blocks`."""

    async def retire(self, worker_id: str) -> None:
        """Take the card away: the worker leaves."""

    async def close(self) -> None: ...

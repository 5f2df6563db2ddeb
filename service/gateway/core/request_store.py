"""Requests that any gateway can find by id or idempotency key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.errors import EndReason, RequestError
from service.gateway.core.accepted_request import AcceptedRequest, accepted_from, new_request_id, record_of
from service.gateway.core.admission import Admission
from service.gateway.core.dispatcher import RequestDispatcher
from service.gateway.core.queue_writes import stored
from service.gateway.core.refusals import UNAVAILABLE, unavailable
from service.gateway.core.request import GenerationRequest, OutlineReader
from service.gateway.core.response_assembler import ChoiceDelta, Outcome
from service.gateway.core.text_threads import TextThreads
from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.messages import Cancel, RequestRecord
from service.queue.records import StorageFull, StorageLimits

_PREFIX = re.compile("^(chatcmpl-|cmpl-|msg_)")
SLACK_S = 5.0
"""Time left for reading a complete response after its deadline."""


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """A request's progress, with `deltas` and `outcome`, or `error`, once it ended."""

    status: str  # queued | in_progress | completed | cancelled | failed
    queue_position: int | None = None  # number of the tenant's jobs queued before it
    deltas: Sequence[ChoiceDelta] = ()
    outcome: Outcome | None = None
    error: RequestError | None = None

    @property
    def is_open(self) -> bool:
        return self.status in ("queued", "in_progress")


class RequestStore:
    def __init__(
        self,
        queue: GatewayQueue,
        admission: Admission,
        dispatcher: RequestDispatcher,
        threads: TextThreads,
        limits: StorageLimits,
        read_outline: OutlineReader,
    ) -> None:
        self._queue = queue
        self._admission = admission
        self._dispatcher = dispatcher
        self._threads = threads
        self._limits = limits
        self._read_outline = read_outline

    async def accept(self, request: GenerationRequest, tenant: str, idempotency_key: str | None) -> AcceptedRequest:
        """Admit a request that any gateway can find.

        With a key or client id it can be found at once, else once submitted. It has no jobs if an earlier request used
        the key. Raises RequestError like `admit`; 409 if the key was used with another body.
        """
        accepted = await self._admission.admit(request, tenant, new_request_id())
        if idempotency_key is None:
            accepted = await self._named(accepted)
            return replace(accepted, record=record_of(accepted))
        digest = _key_digest(tenant, idempotency_key)
        accepted = replace(accepted, idempotency=digest)
        try:
            record = await self._first_under(digest, accepted)
            if record is None:
                return await self._named(accepted)
            if record.digest != request.source.digest:
                message = "The Idempotency-Key was used before, with another request."
                raise RequestError(409, message, param="Idempotency-Key", code="idempotency_key_reused")
            earlier = await self._rebuilt(record)
            events = await self._queue.last_events(earlier.job_ids)
        except QueueUnavailable:
            raise unavailable() from None
        earlier = replace(earlier, is_repeat=True)
        if all(events):
            return earlier
        # Its gateway may have died before all jobs were queued. The queue accepts no job twice, and a missing job
        # generates the same output: the default seed is derived from the request's id.
        again = await self._admission.admit(request, tenant, earlier.request_id)
        unsubmitted = tuple(job for job, event in zip(again.jobs, events, strict=True) if event is None)
        return replace(earlier, jobs=unsubmitted, idempotency=digest)

    async def _named(self, accepted: AcceptedRequest) -> AcceptedRequest:
        """Give a request the client's id unless that is taken. Raises RequestError."""
        if not accepted.request.client_id:
            return accepted
        named = replace(accepted, client_id=accepted.request.client_id)
        limits = self._limits
        if not accepted.request.outlives_client:
            limits = replace(limits, max_bytes_per_tenant=limits.max_record_bytes)  # half: max_plain_record_bytes
        digest = _name_digest(accepted.tenant, accepted.request.client_id)
        try:
            holder = await self._queue.requests.put_request(record_of(named), digest, limits)
        except StorageFull:
            return named  # it cannot be found by its client id
        except QueueUnavailable:
            raise unavailable() from None
        if holder != accepted.request_id:
            return accepted
        return replace(named, idempotency=accepted.idempotency or digest)

    async def _first_under(self, digest: str, accepted: AcceptedRequest) -> RequestRecord | None:
        while True:
            holder = await stored(self._queue.requests.put_request(record_of(accepted), digest, self._limits))
            if holder == accepted.request_id:
                return None
            record = await stored(self._queue.requests.get_request(holder))
            if record is not None:  # else it was refused and dropped meanwhile
                return record

    async def forget(self, request_id: str, tenant: str, idempotency_key: str) -> None:
        """Drop the record of a request whose response is stored elsewhere. Raises QueueUnavailable."""
        await self._queue.requests.drop_request(request_id, tenant, _key_digest(tenant, idempotency_key))

    async def find(self, request_id: str, tenant: str) -> AcceptedRequest:
        """Raises RequestError: 404 for an unknown id or one of another tenant, 503."""
        plain = _PREFIX.sub("", request_id)
        try:
            record = await self._record(plain, tenant)
            for name in (request_id, plain):
                if record is None:
                    holder = await self._queue.requests.find_holder(_name_digest(tenant, name))
                    record = None if holder is None else await self._record(holder, tenant)
        except QueueUnavailable:
            raise unavailable() from None
        if record is None:
            raise RequestError(404, "There is no such request.", param="id", code="request_not_found")
        return await self._rebuilt(record)

    async def _record(self, request_id: str, tenant: str) -> RequestRecord | None:
        try:
            record = await self._queue.requests.get_request(request_id)
        except ValueError:
            return None
        return None if record is None or record.tenant != tenant else record

    async def state(self, accepted: AcceptedRequest, *, was_accepted: bool = False) -> RequestState:
        """Return the request's progress. Raises RequestError (503) unless `was_accepted`.

        `was_accepted`: it was just accepted, so it counts as queued if the queue is unavailable.
        """
        try:
            events = await self._queue.last_events(accepted.job_ids)
            position = None if any(events) else await self._queue.queue_position(accepted.request_id)
        except QueueUnavailable:
            if was_accepted:
                return RequestState(status="queued")
            raise unavailable() from None
        if not all(event is not None and event.end is not None for event in events):
            return RequestState(status="in_progress" if any(events) else "queued", queue_position=position)
        try:
            async with self._dispatcher.view(accepted) as stream:
                deltas = await stream.read_all()
        except RequestError as error:
            if error.code == UNAVAILABLE:
                raise
            status = "cancelled" if error.code == EndReason.CANCELLED else "failed"
            return RequestState(status=status, queue_position=position, error=error)
        return RequestState(status="completed", queue_position=position, deltas=deltas, outcome=stream.outcome)

    async def cancel(self, accepted: AcceptedRequest) -> None:
        """Cancel the request's jobs. Raises RequestError (503)."""
        try:
            for job_id in accepted.job_ids:
                await self._queue.cancel(Cancel(job_id=job_id, reason=EndReason.CANCELLED))
        except QueueUnavailable:
            raise unavailable() from None

    async def _rebuilt(self, record: RequestRecord) -> AcceptedRequest:
        try:
            now_s = await self._queue.now_s()
        except QueueUnavailable:
            raise unavailable() from None
        accepted = await self._threads.run_sized(
            len(record.outline), record.tenant, accepted_from, record, now_s, self._read_outline
        )
        return accepted if accepted.timeout_s > SLACK_S else accepted.with_timeout(SLACK_S)


def _name_digest(tenant: str, client_id: str) -> str:
    return hashlib.sha256(f"{tenant}\0id\0{client_id}".encode()).hexdigest()  # a client's key cannot contain NUL


def _key_digest(tenant: str, key: str) -> str:
    return hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()

"""Requests as resources: found again under their id, by any gateway, as long as the queue remembers them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from service.errors import EndReason, RequestError
from service.gateway.core.accepted_request import AcceptedRequest, accepted_from, record_of
from service.gateway.core.admission import UNAVAILABLE, Admission, unavailable
from service.gateway.core.dispatcher import RequestDispatcher
from service.gateway.core.job_ids import new_job_id
from service.gateway.core.storage import stored
from service.gateway.core.text_threads import TextThreads
from service.gateway.core.whole_answers import whole_answer
from service.gateway.generation.request import GenerationRequest
from service.gateway.openai.answers import Json, ResponseBuilder, error_object
from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.messages import Cancel, RequestRecord
from service.queue.storage import StorageLimits

SMALL_OUTLINE_BYTES = 8 << 10
"""What is read in a millisecond at most is read at once."""
SLACK_S = 5.0
"""An answer that is complete may be read so long after its deadline, and a last event may be so late."""


class RequestStore:
    def __init__(
        self,
        queue: GatewayQueue,
        admission: Admission,
        dispatcher: RequestDispatcher,
        threads: TextThreads,
        limits: StorageLimits,
    ) -> None:
        self._queue = queue
        self._admission = admission
        self._dispatcher = dispatcher
        self._threads = threads
        self._limits = limits

    async def accept(self, request: GenerationRequest, tenant: str, idempotency_key: str | None) -> AcceptedRequest:
        """The accepted request, which will be remembered once it is submitted, or is already where it has a key; one
        without jobs where the same request came before under its key. Raises RequestError like `admit`, and 409 where
        the key stands for another one."""
        accepted = await self._admission.admit(request, tenant, new_job_id())
        if idempotency_key is None:
            return replace(accepted, record=record_of(accepted))
        digest = _key_digest(tenant, idempotency_key)
        accepted = replace(accepted, idempotency=digest)
        try:
            record = await self._first_under(digest, accepted)
            if record is None:
                return accepted
            if record.digest != request.source.digest:
                message = "The Idempotency-Key was used before, with another request."
                raise RequestError(409, message, param="Idempotency-Key", code="idempotency_key_reused")
            earlier = await self._ticket(record)
            events = await self._queue.last_events(earlier.job_ids)
        except QueueUnavailable:
            raise unavailable() from None
        earlier = replace(earlier, came_before=True)
        if all(events):
            return earlier
        # Its gateway may have heard no answer, or died before all was queued. No job is accepted twice; one that is not
        # there generates the same, since a seed that the client has not chosen follows from the request's id.
        again = await self._admission.admit(request, tenant, earlier.request_id)
        missing = tuple(job for job, event in zip(again.jobs, events, strict=True) if event is None)
        return replace(earlier, jobs=missing, idempotency=digest)

    async def _first_under(self, digest: str, accepted: AcceptedRequest) -> RequestRecord | None:
        """The record of an earlier request under the same key; None: this one is the first, and is remembered. Raises
        RequestError (429, 503)."""
        while True:
            holder = await stored(self._queue.remember(record_of(accepted), digest, self._limits))
            if holder == accepted.request_id:
                return None
            record = await stored(self._queue.recall(holder))
            if record is not None:  # else it was refused and forgotten between the two
                return record

    async def forget(self, request_id: str, tenant: str, idempotency_key: str) -> None:
        """A request that was accepted under this key, and whose answer is kept elsewhere. Raises QueueUnavailable."""
        await self._queue.forget(request_id, tenant, _key_digest(tenant, idempotency_key))

    async def find(self, request_id: str, tenant: str) -> AcceptedRequest:
        """Raises RequestError: 404 for one that is forgotten, never was, or is another tenant's."""
        try:
            record = await self._queue.recall(request_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))
        except QueueUnavailable:
            raise unavailable() from None
        except ValueError:
            record = None
        if record is None or record.tenant != tenant:
            raise RequestError(404, "There is no such request.", param="id", code="request_not_found")
        return await self._ticket(record)

    async def state(self, accepted: AcceptedRequest, builder: ResponseBuilder, *, was_accepted: bool = False) -> Json:
        """How far the request is; with `response` or `error` once it has ended. `queue_position`: how many of its
        tenant's own jobs go before it. `was_accepted` just now: it counts as queued if the queue cannot be asked, where
        else that is a RequestError (503)."""
        state = {
            "id": accepted.request_id,
            "object": "request",
            "endpoint": accepted.request.endpoint,
            "created": int(accepted.created_s),
            "background": accepted.request.background,
            "queue_position": None,
            "error": None,
            "response": None,
        }
        try:
            events = await self._queue.last_events(accepted.job_ids)
            place = None if any(events) else await self._queue.place(accepted.request_id)
        except QueueUnavailable:
            if was_accepted:
                return {**state, "status": "queued"}
            raise unavailable() from None
        if not all(event is not None and event.end is not None for event in events):
            return {**state, "status": "in_progress" if any(events) else "queued", "queue_position": place}
        try:
            async with self._dispatcher.view(accepted) as stream:
                deltas = [delta async for delta in stream]
        except RequestError as error:
            if error.code == UNAVAILABLE:
                raise
            status = "cancelled" if error.code == EndReason.CANCELLED else "failed"
            return {**state, "status": status, "error": error_object(error)}
        response = await whole_answer(self._threads, accepted, builder, deltas, stream.outcome)
        return {**state, "status": "completed", "response": response}

    async def cancel(self, accepted: AcceptedRequest) -> None:
        """Asks for the end of every job that has not ended. Raises RequestError (503)."""
        try:
            for job_id in accepted.job_ids:
                await self._queue.cancel(Cancel(job_id=job_id, reason=EndReason.CANCELLED))
        except QueueUnavailable:
            raise unavailable() from None

    async def _ticket(self, record: RequestRecord) -> AcceptedRequest:
        try:
            now_s = await self._queue.now_s()
        except QueueUnavailable:
            raise unavailable() from None
        if len(record.outline) <= SMALL_OUTLINE_BYTES:
            accepted = accepted_from(record, now_s)
        else:
            accepted = await self._threads.run(record.tenant, accepted_from, record, now_s)
        return accepted if accepted.timeout_s > SLACK_S else accepted.with_timeout(SLACK_S)


def _key_digest(tenant: str, key: str) -> str:
    return hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()

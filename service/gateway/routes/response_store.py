"""Stored responses, by id."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.queue_writes import stored, write
from service.gateway.core.refusals import refusal, storage_refusal, unavailable
from service.gateway.core.service import InferenceService
from service.gateway.openai.json_objects import Json
from service.gateway.openai.response_builder import build_whole
from service.gateway.openai.responses.builder import RESPONSE_PREFIX, responses_builder_of
from service.queue.interface import QueueUnavailable
from service.queue.keys import LOG_ENDED_TTL_S
from service.queue.records import StorageFull, StoredResponse

MAX_CONVERSATION_BYTES = 4 << 20
SETTLE_WITHIN_S = float(LOG_ENDED_TTL_S)
"""Lifetime of the events from which a response can be rebuilt."""


class ResponseStore:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._queue = service.queue
        self._background = service.dispatcher.background
        self._retention_s = service.settings.response_retention

    async def put(self, record: StoredResponse) -> None:
        """Raises RequestError (429, 503)."""
        try:
            await write(lambda: self._queue.responses.put_response(record, self._retention_s, self._service.storage))
        except StorageFull as full:
            raise storage_refusal(full) from None
        except QueueUnavailable:
            raise unavailable() from None

    async def settle(self, record: StoredResponse, answer: Json) -> None:
        """Store the final response. If the queue is unavailable, retry in the background for SETTLE_WITHIN_S.

        Meanwhile `current` can rebuild it.
        """
        settled = replace(record, answer=answer)
        try:
            await self._queue.responses.settle_response(settled, self._retention_s)
        except QueueUnavailable:
            self._background.repeat(
                lambda: self._queue.responses.settle_response(settled, self._retention_s),
                "response not stored",
                SETTLE_WITHIN_S,
                response=record.response_id,
            )

    def withdraw(self, record: StoredResponse) -> None:
        """Drop a refused request's record, in the background."""
        drop = partial(self._queue.responses.drop_response, record)
        self._background.repeat(drop, "refused response not dropped", response=record.response_id)

    async def drop(self, record: StoredResponse) -> None:
        """Raises RequestError (503)."""
        await stored(self._queue.responses.drop_response(record))
        await stored(self._queue.requests.drop_request(_request_id(record), record.tenant))

    async def find(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises RequestError: 404 for an unknown id or one of another tenant, 503."""
        record = await self._found(response_id, tenant)
        if record is None:
            raise RequestError(404, "There is no such response.", param="response_id", code="response_not_found")
        return record

    async def conversation(self, response_id: str, tenant: str) -> list[Json]:
        """Return all items up to the response's end.

        Raises RequestError: 400 for an unknown id, another tenant's, or a failed response.
        """
        param = "previous_response_id"
        record = await self._found(response_id, tenant)
        if record is None:
            raise RequestError(400, "There is no such response.", param=param, code="previous_response_not_found")
        answer = await self.current(record)
        if answer["status"] not in ("completed", "incomplete"):
            raise refusal(param, f"is of a response that is {answer['status']}")
        return [*record.context, *record.input, *answer["output"]]

    async def accepted(self, record: StoredResponse) -> AcceptedRequest | None:
        """Return the request whose events make up the response; None: forgotten."""
        try:
            return await self._service.find(_request_id(record), record.tenant)
        except RequestError as error:
            if error.status == 404:
                return None
            raise

    async def current(self, record: StoredResponse) -> Json:
        """Return the response's current state. If it has ended and its gateway did not store it, store it."""
        if record.is_settled:
            return dict(record.answer)
        accepted = await self.accepted(record)
        if accepted is None:
            error = {"code": "server_error", "message": "The answer was lost before it was stored."}
            return {**record.answer, "status": "failed", "error": error}
        state = await self._service.state(accepted)
        builder = responses_builder_of(self._service.model, accepted)
        if state.error is not None:
            answer = builder.failed(state.error.code, state.error.message)
        elif state.outcome is not None:
            answer = await build_whole(self._service.threads, accepted, builder, state.deltas, state.outcome)
        else:
            return builder.unfinished(state.status)
        await self.settle(record, answer)
        return answer

    async def _found(self, response_id: str, tenant: str) -> StoredResponse | None:
        try:
            record = await stored(self._queue.responses.get_response(response_id))
        except ValueError:
            return None
        return record if record is not None and record.tenant == tenant else None


def check_size(context: list[Json], items: list[Json]) -> None:
    """Raises RequestError (400) for a conversation that is too long to store."""
    if len(msgspec.json.encode([context, items])) > MAX_CONVERSATION_BYTES:
        raise refusal("input", f"takes more than {MAX_CONVERSATION_BYTES} bytes, too many for 'store' to be true")


def _request_id(record: StoredResponse) -> str:
    return record.response_id.removeprefix(RESPONSE_PREFIX)

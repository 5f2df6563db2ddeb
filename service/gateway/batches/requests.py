"""One line of a batch as a request like any other: each endpoint's own reading, and its own words for the answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from service.errors import STORAGE_QUOTA_EXCEEDED, RequestError
from service.gateway.core.accepted_request import Ticket
from service.gateway.core.service import Hall
from service.gateway.core.whole_answers import whole_answer
from service.gateway.generation.refusals import refusal
from service.gateway.generation.request import EMBEDDINGS, RESPONSES
from service.gateway.generation.response_assembler import Piece
from service.gateway.generation.response_stream import Run
from service.gateway.openai.items import check_answered_calls, items_of
from service.gateway.openai.response_bodies import in_own_words
from service.gateway.openai.strict_json import decode_object
from service.gateway.routes.embeddings import embedding_answer, require_enabled
from service.gateway.routes.response_store import ResponseShelf, check_size
from service.observability.logs import fields
from service.queue.interface import QueueUnavailable
from service.queue.responses import StoredResponse

log = logging.getLogger("quire.batches")

Json = dict[str, Any]


class BatchRequests:
    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._shelf = ResponseShelf(hall)

    async def answer(self, endpoint: str, body: bytes, tenant: str, key: str) -> tuple[str, Json]:
        """The request's id and its answer; the same under the same `key`, whoever asked first. Raises RequestError,
        RanLate, RanPastOwnTimeout and NotStored among them."""
        hall = self._hall
        if endpoint == EMBEDDINGS:
            require_enabled(hall.settings)
        request = await hall.read(endpoint, body, tenant)
        if request.stream or request.background:
            raise RequestError(400, "A request of a batch neither streams nor runs in the background.")
        if endpoint == RESPONSES:
            await hall.threads.run(tenant, _check_response, body)
        try:
            ticket = await hall.accept(replace(request, background=True, is_batch=True), tenant, key)
        except RequestError as error:
            raise in_own_words(error) if endpoint in (RESPONSES, EMBEDDINGS) else error from None
        run = None
        try:
            if ticket.jobs:
                await hall.keep(ticket)
            async with hall.view(ticket) as run:
                pieces = [piece async for piece in run]
        except asyncio.CancelledError as cancelled:
            raise Interrupted(ticket) from cancelled
        except RequestError as error:
            if error.status == 504 and request.timeout_s is not None:
                raise RanPastOwnTimeout(error.status, error.message, error.type, code=error.code) from None
            if error.status == 504 and run is not None and run.outcome.completion_tokens:
                raise RanLate(error.status, error.message, error.type, code=error.code) from None
            raise
        plain = replace(ticket, request=replace(ticket.request, background=False))
        return ticket.request_id, await self._worded(plain, body, pieces, run)

    async def _worded(self, ticket: Ticket, body: bytes, pieces: list[Piece], run: Run) -> Json:
        hall, endpoint = self._hall, ticket.request.endpoint
        if endpoint == EMBEDDINGS:
            return await embedding_answer(hall, ticket, run)
        answer = await whole_answer(hall.threads, ticket, hall.form(ticket), pieces, run.outcome)
        if endpoint == RESPONSES and answer["store"]:
            record = StoredResponse(
                response_id=answer["id"],
                tenant=ticket.tenant,
                created_s=ticket.created_s,
                answer=answer,
                input=await hall.threads.run(ticket.tenant, _items, body),
            )
            try:
                await self._shelf.put(record)
            except RequestError as error:
                if error.code != STORAGE_QUOTA_EXCEEDED:
                    raise
                raise NotStored(error.status, error.message, error.type, code=error.code) from None
        return answer

    async def forget(self, request_id: str, tenant: str, key: str) -> None:
        """The answer is stored: nothing goes on with its request any more."""
        try:
            await self._hall.requests.forget(request_id, tenant, key)
        except QueueUnavailable:
            log.warning("the record of a batch's request stays for a while %s", fields(request=request_id))


class RanLate(RequestError):
    """The request had begun to answer when its time was over: it did not only wait for others."""


class RanPastOwnTimeout(RequestError):
    """The request names its own timeout, and would run past it again."""


class NotStored(RequestError):
    """The response was made, and its tenant may store no more."""


class Interrupted(asyncio.CancelledError):
    """The batch no longer waits for this request, which goes on unless it is cancelled too."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket


def _check_response(body: bytes) -> None:
    """Raises RequestError (400)."""
    asked = decode_object(body)
    if asked.get("previous_response_id") is not None:
        raise refusal("previous_response_id", "cannot be given in a batch, whose lines may be answered days later")
    items = items_of(asked["input"])
    check_answered_calls(items)
    if asked.get("store") is not False:
        check_size([], items)


def _items(body: bytes) -> list[Json]:
    return items_of(decode_object(body)["input"])

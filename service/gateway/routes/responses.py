"""`/v1/responses`: answers that are kept, so that a later one can go on with their conversation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from aiohttp import web

from service.errors import RequestError
from service.gateway.core.accepted_request import Ticket
from service.gateway.core.admission import UNAVAILABLE
from service.gateway.core.back_pressure import NoRoom
from service.gateway.core.service import Hall, incident
from service.gateway.core.whole_answers import whole_answer
from service.gateway.generation.refusals import refusal
from service.gateway.generation.request import RESPONSES, Request
from service.gateway.generation.response_stream import Run
from service.gateway.http.middleware import ACCEPTED, TENANT, json_response, read_body
from service.gateway.http.sse import ClientGone, SseStream
from service.gateway.openai.items import check_answered_calls, items_of
from service.gateway.openai.response_bodies import in_own_words
from service.gateway.openai.response_form import ResponseForm
from service.gateway.openai.strict_json import decode_object
from service.gateway.openai.validator import read_request, source_of
from service.gateway.routes.completions import REQUEST_ID, idempotency_key, last_event_id, stream_of, wants_stream
from service.gateway.routes.pages import is_ascending, page_json
from service.gateway.routes.response_store import ResponseShelf, check_size
from service.queue.responses import StoredResponse

Json = dict[str, Any]
Opened = AbstractAsyncContextManager[Run]

RESPONSE_ROUTE = "/v1/responses/{response_id}"
CANCEL_WAIT_S = 5.0
DEFAULT_PAGE = 20


class Responses:
    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._shelf = ResponseShelf(hall)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(RESPONSES, self._create),
            web.get(RESPONSE_ROUTE, self._get),
            web.delete(RESPONSE_ROUTE, self._delete),
            web.post(f"{RESPONSE_ROUTE}/cancel", self._cancel),
            web.get(f"{RESPONSE_ROUTE}/input_items", self._input_items),
        ]

    async def _create(self, http: web.Request) -> web.StreamResponse:
        key, after = idempotency_key(http), last_event_id(http)
        request, context, items = await self._read(await read_body(http), http[TENANT])
        if key is not None and not request.background:
            request = replace(request, resumable=True)
        try:
            ticket = await self._hall.accept(request, http[TENANT], key)
        except RequestError as error:
            raise in_own_words(error) from None
        http[ACCEPTED] = ticket.request_id
        form = self._hall.response_form(ticket)
        record = StoredResponse(
            response_id=form.response_id,
            tenant=ticket.tenant,
            created_s=ticket.created_s,
            answer=form.unfinished("queued"),
            context=context,
            input=items,
        )
        if not record.answer["store"]:
            record = None
        if not ticket.request.stays:
            return await self._answer(http, ticket, self._hall.open(ticket), 0, record)
        if not ticket.came_before:
            after = 0
        if ticket.jobs:
            await self._keep(ticket, record)
        if ticket.request.background and not ticket.request.stream:
            is_new = bool(ticket.jobs)
            answer = (
                record.answer
                if is_new
                else await self._shelf.current(await self._shelf.find(form.response_id, ticket.tenant))
            )
            return json_response(answer, headers={REQUEST_ID: ticket.request_id})
        return await self._answer(http, ticket, self._hall.view(ticket), after, None)

    async def _read(self, data: bytes, tenant: str) -> tuple[Request, list[Json], list[Json]]:
        """The request, the items of the responses that it goes on with, and its own. Raises RequestError."""
        run = self._hall.threads.run
        fields, request, items = await run(tenant, _read_fields, data)
        previous = fields.get("previous_response_id")
        if previous is None:
            return request, [], items
        context = await self._shelf.conversation(previous, tenant)
        return await run(tenant, _read_with, fields, request, context, items), context, items

    async def _keep(self, ticket: Ticket, record: StoredResponse | None) -> None:
        """Sees to a response that needs no client, and to its record."""
        form = self._hall.response_form(ticket)

        async def read(run: Run) -> None:
            try:
                async for piece in run:
                    form.chunks(piece)
                answer = form.closing(run.outcome)[-1]["response"]
            except RequestError as error:
                answer = form.failed(error.code, error.message)
            if record is not None:
                await self._shelf.settle(record, answer)

        if record is not None:
            await self._shelf.put(record)
        try:
            await self._hall.keep(ticket, read)
        except NoRoom:
            if record is not None:
                self._shelf.withdraw(record)
            raise

    async def _get(self, http: web.Request) -> web.StreamResponse:
        record = await self._found(http)
        if http.query.getall("include", []) or http.query.getall("include[]", []):
            raise refusal("include", "cannot be given here: everything there is stands in the answer")
        if wants_stream(http):
            ticket = await self._shelf.ticket(record)
            if ticket is None:
                raise refusal("stream", "cannot be true any more: the events of this response are forgotten")
            return await self._stream(http, ticket, self._hall.view(ticket), _starting_after(http), None)
        return json_response(await self._shelf.current(record))

    async def _delete(self, http: web.Request) -> web.Response:
        """Forgets the response; one in the background that is under way ends."""
        record = await self._found(http)
        ticket = None if record.is_settled else await self._shelf.ticket(record)
        await self._shelf.drop(record)
        if ticket is not None and ticket.request.background:
            await self._hall.cancel(ticket)
        return json_response({"id": record.response_id, "object": "response", "deleted": True})

    async def _cancel(self, http: web.Request) -> web.Response:
        """Ends a response that runs in the background; one that has ended stays as it is."""
        record = await self._found(http)
        if not record.answer["background"]:
            raise refusal("response_id", "is of a response that does not run in the background")
        answer = await self._shelf.current(record)
        ticket = await self._shelf.ticket(record)
        if answer["status"] not in ("queued", "in_progress") or ticket is None:
            return json_response(answer)
        await self._hall.cancel(ticket)
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                answer = await self._end(ticket)
            await self._shelf.settle(record, answer)
        except TimeoutError:
            answer = {**answer, "status": "cancelled"}  # it is told, and will be as soon as its worker hears of it
        return json_response(answer)

    async def _end(self, ticket: Ticket) -> Json:
        """The response as it ends."""
        form = self._hall.response_form(ticket)
        try:
            async with self._hall.view(ticket) as run:
                async for piece in run:
                    form.chunks(piece)
        except RequestError as error:
            if error.code == UNAVAILABLE:
                raise
            return form.failed(error.code, error.message)
        return form.closing(run.outcome)[-1]["response"]

    async def _input_items(self, http: web.Request) -> web.Response:
        record = await self._found(http)
        items = [*record.context, *record.input]
        if not is_ascending(http):
            items.reverse()
        return json_response(page_json(http, items, DEFAULT_PAGE))

    async def _found(self, http: web.Request) -> StoredResponse:
        return await self._shelf.find(http.match_info["response_id"], http[TENANT])

    async def _answer(
        self, http: web.Request, ticket: Ticket, opened: Opened, after: int, record: StoredResponse | None
    ) -> web.StreamResponse:
        if ticket.request.stream:
            return await self._stream(http, ticket, opened, after, record)
        form = self._hall.response_form(ticket)
        async with opened as run:
            if record is not None:
                await self._shelf.put(record)
            pieces = [piece async for piece in run]
        answer = await whole_answer(self._hall.threads, ticket, form, pieces, run.outcome)
        if record is not None:
            await self._shelf.settle(record, answer)
        return json_response(answer, headers={REQUEST_ID: ticket.request_id})

    async def _stream(
        self, http: web.Request, ticket: Ticket, opened: Opened, after: int, record: StoredResponse | None
    ) -> web.StreamResponse:
        """A `record` is put as soon as the response is accepted, and settled with its last event."""
        stream = stream_of(http, ticket, self._hall.settings, after)
        if http.method == "HEAD":
            return stream.response
        try:
            answer = await self._tell(stream, self._hall.response_form(ticket), opened, record)
            if record is not None:
                await self._shelf.settle(record, answer)
        except ClientGone:
            pass  # its job is cancelled already, or goes on without it; nobody is left to hear of it
        return stream.response

    async def _tell(self, stream: SseStream, form: ResponseForm, opened: Opened, record: StoredResponse | None) -> Json:
        """The response as it ended, once all its events are sent. What goes wrong before it is accepted is raised."""
        is_accepted = is_told = False
        try:
            async with opened as run, stream.kept_alive():
                if record is not None:
                    await self._shelf.put(record)
                is_accepted = True
                await _send(stream, form.opening())
                async for piece in run:
                    await _send(stream, form.chunks(piece))
                events = form.closing(run.outcome)
                await _send(stream, events)
                is_told = True
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not is_accepted:
                raise
            if is_told:
                return events[-1]["response"]
            told = error if isinstance(error, RequestError) else incident(error, "stream")
            events = form.failure(told)
            await _send(stream, events)
        return events[-1]["response"]


async def _send(stream: SseStream, events: Sequence[Json]) -> None:
    for event in events:
        await stream.send(event, event["type"])


def _read_fields(data: bytes) -> tuple[Json, Request, list[Json]]:
    fields = decode_object(data)
    request = read_request(RESPONSES, fields)
    items = items_of(fields["input"])
    if fields.get("previous_response_id") is None:
        _check_items(fields, [], items)
    return fields, replace(request, source=source_of(request, fields)), items


def _read_with(fields: Mapping[str, Any], request: Request, context: list[Json], items: list[Json]) -> Request:
    """The request again, with the conversation that it goes on with."""
    whole = read_request(RESPONSES, {**fields, "input": [*context, *items]})
    _check_items(fields, context, items)
    return replace(whole, source=request.source)


def _check_items(fields: Mapping[str, Any], context: list[Json], items: list[Json]) -> None:
    """Raises RequestError (400)."""
    check_answered_calls([*context, *items])
    if fields.get("store") is not False:
        check_size(context, items)


def _starting_after(http: web.Request) -> int:
    """How many events the client has. Raises RequestError (400)."""
    text = http.query.get("starting_after")
    if text is None:
        return last_event_id(http)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise refusal("starting_after", "must be the sequence number of an event")
    return int(text) + 1

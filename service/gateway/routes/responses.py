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
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.admission import UNAVAILABLE
from service.gateway.core.back_pressure import NoRoom
from service.gateway.core.service import InferenceService, incident
from service.gateway.core.whole_answers import whole_answer
from service.gateway.generation.refusals import refusal
from service.gateway.generation.request import RESPONSES, GenerationRequest
from service.gateway.generation.response_stream import ResponseStream
from service.gateway.http.middleware import ACCEPTED, TENANT, json_response, read_body
from service.gateway.http.sse import ClientGone, SseStream
from service.gateway.openai.items import check_answered_calls, items_of
from service.gateway.openai.response_bodies import in_own_words
from service.gateway.openai.response_form import ResponsesBuilder
from service.gateway.openai.strict_json import decode_object
from service.gateway.openai.validator import read_request, source_of
from service.gateway.routes.completions import REQUEST_ID, idempotency_key, last_event_id, sse_of, wants_stream
from service.gateway.routes.pages import is_ascending, page_json
from service.gateway.routes.response_store import ResponseStore, check_size
from service.queue.responses import StoredResponse

Json = dict[str, Any]
Opened = AbstractAsyncContextManager[ResponseStream]

RESPONSE_ROUTE = "/v1/responses/{response_id}"
CANCEL_WAIT_S = 5.0
DEFAULT_PAGE = 20


class Responses:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._store = ResponseStore(service)

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
            accepted = await self._service.accept(request, http[TENANT], key)
        except RequestError as error:
            raise in_own_words(error) from None
        http[ACCEPTED] = accepted.request_id
        builder = self._service.responses_builder(accepted)
        record = StoredResponse(
            response_id=builder.response_id,
            tenant=accepted.tenant,
            created_s=accepted.created_s,
            answer=builder.unfinished("queued"),
            context=context,
            input=items,
        )
        if not record.answer["store"]:
            record = None
        if not accepted.request.stays:
            return await self._answer(http, accepted, self._service.open(accepted), 0, record)
        if not accepted.came_before:
            after = 0
        if accepted.jobs:
            await self._keep(accepted, record)
        if accepted.request.background and not accepted.request.stream:
            is_new = bool(accepted.jobs)
            answer = (
                record.answer
                if is_new
                else await self._store.current(await self._store.find(builder.response_id, accepted.tenant))
            )
            return json_response(answer, headers={REQUEST_ID: accepted.request_id})
        return await self._answer(http, accepted, self._service.view(accepted), after, None)

    async def _read(self, data: bytes, tenant: str) -> tuple[GenerationRequest, list[Json], list[Json]]:
        """The request, the items of the responses that it goes on with, and its own. Raises RequestError."""
        in_thread = self._service.threads.run
        fields, request, items = await in_thread(tenant, _read_fields, data)
        previous = fields.get("previous_response_id")
        if previous is None:
            return request, [], items
        context = await self._store.conversation(previous, tenant)
        return await in_thread(tenant, _read_with, fields, request, context, items), context, items

    async def _keep(self, accepted: AcceptedRequest, record: StoredResponse | None) -> None:
        """Sees to a response that needs no client, and to its record."""
        builder = self._service.responses_builder(accepted)

        async def read(stream: ResponseStream) -> None:
            try:
                async for delta in stream:
                    builder.chunks(delta)
                answer = builder.closing(stream.outcome)[-1]["response"]
            except RequestError as error:
                answer = builder.failed(error.code, error.message)
            if record is not None:
                await self._store.settle(record, answer)

        if record is not None:
            await self._store.put(record)
        try:
            await self._service.keep(accepted, read)
        except NoRoom:
            if record is not None:
                self._store.withdraw(record)
            raise

    async def _get(self, http: web.Request) -> web.StreamResponse:
        record = await self._found(http)
        if http.query.getall("include", []) or http.query.getall("include[]", []):
            raise refusal("include", "cannot be given here: everything there is stands in the answer")
        if wants_stream(http):
            accepted = await self._store.accepted(record)
            if accepted is None:
                raise refusal("stream", "cannot be true any more: the events of this response are forgotten")
            return await self._stream(http, accepted, self._service.view(accepted), _starting_after(http), None)
        return json_response(await self._store.current(record))

    async def _delete(self, http: web.Request) -> web.Response:
        """Forgets the response; one in the background that is under way ends."""
        record = await self._found(http)
        accepted = None if record.is_settled else await self._store.accepted(record)
        await self._store.drop(record)
        if accepted is not None and accepted.request.background:
            await self._service.cancel(accepted)
        return json_response({"id": record.response_id, "object": "response", "deleted": True})

    async def _cancel(self, http: web.Request) -> web.Response:
        """Ends a response that runs in the background; one that has ended stays as it is."""
        record = await self._found(http)
        if not record.answer["background"]:
            raise refusal("response_id", "is of a response that does not run in the background")
        answer = await self._store.current(record)
        accepted = await self._store.accepted(record)
        if answer["status"] not in ("queued", "in_progress") or accepted is None:
            return json_response(answer)
        await self._service.cancel(accepted)
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                answer = await self._end(accepted)
            await self._store.settle(record, answer)
        except TimeoutError:
            answer = {**answer, "status": "cancelled"}  # it is told, and will be as soon as its worker hears of it
        return json_response(answer)

    async def _end(self, accepted: AcceptedRequest) -> Json:
        """The response as it ends."""
        builder = self._service.responses_builder(accepted)
        try:
            async with self._service.view(accepted) as stream:
                async for delta in stream:
                    builder.chunks(delta)
        except RequestError as error:
            if error.code == UNAVAILABLE:
                raise
            return builder.failed(error.code, error.message)
        return builder.closing(stream.outcome)[-1]["response"]

    async def _input_items(self, http: web.Request) -> web.Response:
        record = await self._found(http)
        items = [*record.context, *record.input]
        if not is_ascending(http):
            items.reverse()
        return json_response(page_json(http, items, DEFAULT_PAGE))

    async def _found(self, http: web.Request) -> StoredResponse:
        return await self._store.find(http.match_info["response_id"], http[TENANT])

    async def _answer(
        self, http: web.Request, accepted: AcceptedRequest, opened: Opened, after: int, record: StoredResponse | None
    ) -> web.StreamResponse:
        if accepted.request.stream:
            return await self._stream(http, accepted, opened, after, record)
        builder = self._service.responses_builder(accepted)
        async with opened as stream:
            if record is not None:
                await self._store.put(record)
            deltas = [delta async for delta in stream]
        answer = await whole_answer(self._service.threads, accepted, builder, deltas, stream.outcome)
        if record is not None:
            await self._store.settle(record, answer)
        return json_response(answer, headers={REQUEST_ID: accepted.request_id})

    async def _stream(
        self, http: web.Request, accepted: AcceptedRequest, opened: Opened, after: int, record: StoredResponse | None
    ) -> web.StreamResponse:
        """A `record` is put as soon as the response is accepted, and settled with its last event."""
        sse = sse_of(http, accepted, self._service.settings, after)
        if http.method == "HEAD":
            return sse.response
        try:
            answer = await self._send_deltas(sse, self._service.responses_builder(accepted), opened, record)
            if record is not None:
                await self._store.settle(record, answer)
        except ClientGone:
            pass  # its job is cancelled already, or goes on without it; nobody is left to hear of it
        return sse.response

    async def _send_deltas(
        self, sse: SseStream, builder: ResponsesBuilder, opened: Opened, record: StoredResponse | None
    ) -> Json:
        """The response as it ended, once all its events are sent. What goes wrong before it is accepted is raised."""
        is_accepted = is_sent = False
        try:
            async with opened as stream, sse.kept_alive():
                if record is not None:
                    await self._store.put(record)
                is_accepted = True
                await _send_events(sse, builder.opening())
                async for delta in stream:
                    await _send_events(sse, builder.chunks(delta))
                events = builder.closing(stream.outcome)
                await _send_events(sse, events)
                is_sent = True
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not is_accepted:
                raise
            if is_sent:
                return events[-1]["response"]
            shown = error if isinstance(error, RequestError) else incident(error, "stream")
            events = builder.failure(shown)
            await _send_events(sse, events)
        return events[-1]["response"]


async def _send_events(sse: SseStream, events: Sequence[Json]) -> None:
    for event in events:
        await sse.send(event, event["type"])


def _read_fields(data: bytes) -> tuple[Json, GenerationRequest, list[Json]]:
    fields = decode_object(data)
    request = read_request(RESPONSES, fields)
    items = items_of(fields["input"])
    if fields.get("previous_response_id") is None:
        _check_items(fields, [], items)
    return fields, replace(request, source=source_of(request, fields)), items


def _read_with(
    fields: Mapping[str, Any], request: GenerationRequest, context: list[Json], items: list[Json]
) -> GenerationRequest:
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

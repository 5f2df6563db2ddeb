"""`/v1/responses`: stored responses, whose conversations later requests can continue."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.back_pressure import NoRoom
from service.gateway.core.refusals import UNAVAILABLE, refusal
from service.gateway.core.request import RESPONSES, GenerationRequest
from service.gateway.core.response_stream import ResponseStream
from service.gateway.core.served_model import ServedModel
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import REQUEST_ID, TENANT, json_response, read_body
from service.gateway.http.sse import ClientGone, SseStream
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_reader import read_request, source_of
from service.gateway.openai.response_builder import build_whole
from service.gateway.openai.responses.builder import ResponsesBuilder, response_of, responses_builder_of
from service.gateway.openai.responses.request_reader import check_answered_calls, items_of, with_own_field_names
from service.gateway.openai.strict_json import decode_object
from service.gateway.routes.generation import (
    Generation,
    OpenStream,
    accept,
    answer_new,
    as_request_error,
    idempotency_key,
    last_event_id,
    refuse_idempotency_key,
    stream,
    wants_stream,
)
from service.gateway.routes.pages import is_ascending, page_json
from service.gateway.routes.response_store import ResponseStore, check_size
from service.queue.records import StoredResponse

RESPONSE_ROUTE = f"{RESPONSES}/{{response_id}}"
COUNT_INPUT_TOKENS = f"{RESPONSES}/input_tokens"
CANCEL_WAIT_S = 5.0
DEFAULT_PAGE = 20


class Responses:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._store = ResponseStore(service)

    async def create(self, http: web.Request) -> web.StreamResponse:
        key, after = idempotency_key(http), last_event_id(http)
        request, context, items = await self._read(await read_body(http), http[TENANT])
        try:
            accepted = await accept(http, self._service, request, key)
        except RequestError as error:
            raise with_own_field_names(error) from None
        builder = responses_builder_of(self._service.model, accepted)
        record = StoredResponse(
            response_id=builder.response_id,
            tenant=accepted.tenant,
            created_s=accepted.created_s,
            answer=builder.unfinished("queued"),
            context=context,
            input=items,
        )
        generation = _Response(self._service, accepted, self._store, record if record.answer["store"] else None)
        return await answer_new(http, generation, after)

    async def count_input_tokens(self, http: web.Request) -> web.Response:
        """Count the tokens of the prompt that `create` would build from the same body."""
        refuse_idempotency_key(http)
        tenant, model = http[TENANT], self._service.model
        request, _, _ = await self._read(await read_body(http), tenant)
        model.require(request.model, await self._service.adapters.loaded_names())
        try:
            num_tokens = await self._service.threads.run(tenant, _count_tokens, model, request)
        except RequestError as error:
            raise with_own_field_names(error) from None
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def _read(self, data: bytes, tenant: str) -> tuple[GenerationRequest, list[Json], list[Json]]:
        """Return the request, the items of the conversation it continues, and its own items. Raises RequestError."""
        in_thread = self._service.threads.run
        fields, request, items = await in_thread(tenant, _read_fields, data)
        previous = fields.get("previous_response_id")
        if previous is None:
            return request, [], items
        context = await self._store.conversation(previous, tenant)
        return await in_thread(tenant, _read_with, fields, request, context, items), context, items

    async def get(self, http: web.Request) -> web.StreamResponse:
        record = await self._found(http)
        if http.query.getall("include", []) or http.query.getall("include[]", []):
            raise refusal("include", "is not supported here: the response already includes everything")
        if wants_stream(http):
            accepted = await self._store.accepted(record)
            if accepted is None:
                raise refusal("stream", "cannot be true any more: the events of this response are forgotten")
            generation = _Response(self._service, accepted, self._store, None)
            return await stream(http, generation, self._service.view(accepted), _starting_after(http))
        return json_response(await self._store.current(record))

    async def delete(self, http: web.Request) -> web.Response:
        """Delete a response; cancel it if it runs in the background."""
        record = await self._found(http)
        accepted = None if record.is_settled else await self._store.accepted(record)
        await self._store.drop(record)
        if accepted is not None and accepted.request.background:
            await self._service.cancel(accepted)
        return json_response({"id": record.response_id, "object": "response", "deleted": True})

    async def cancel(self, http: web.Request) -> web.Response:
        """Cancel an open background response."""
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
                answer = await self._final(accepted)
            await self._store.settle(record, answer)
        except TimeoutError:
            answer = {**answer, "status": "cancelled"}  # true once its worker reads the cancel
        return json_response(answer)

    async def _final(self, accepted: AcceptedRequest) -> Json:
        builder = responses_builder_of(self._service.model, accepted)
        try:
            async with self._service.view(accepted) as deltas:
                return await _read_response(builder, deltas)
        except RequestError as error:
            if error.code == UNAVAILABLE:
                raise
            return builder.failed(error.code, error.message)

    async def input_items(self, http: web.Request) -> web.Response:
        record = await self._found(http)
        items = [*record.context, *record.input]
        if not is_ascending(http):
            items.reverse()
        return json_response(page_json(http, items, DEFAULT_PAGE))

    async def _found(self, http: web.Request) -> StoredResponse:
        return await self._store.find(http.match_info["response_id"], http[TENANT])


class _Response(Generation):
    """Stores its `record` once the jobs are queued, and the response at its end. A record of None stores nothing."""

    def __init__(
        self,
        service: InferenceService,
        accepted: AcceptedRequest,
        store: ResponseStore,
        record: StoredResponse | None,
    ) -> None:
        super().__init__(service, accepted)
        self._store = store
        self._record = record

    async def keep(self) -> None:
        builder, record = self._builder(), self._record

        async def read(deltas: ResponseStream) -> None:
            try:
                answer = await _read_response(builder, deltas)
            except RequestError as error:
                answer = builder.failed(error.code, error.message)
            if record is not None:
                await self._store.settle(record, answer)

        if record is not None:
            await self._store.put(record)
        try:
            await self.service.keep(self.accepted, read)
        except NoRoom:
            if record is not None:
                self._store.withdraw(record)
            raise

    async def background_answer(self) -> web.StreamResponse | None:
        if self.accepted.request.stream:
            return None
        if self.accepted.jobs:
            answer = self._builder().unfinished("queued")
        else:
            response_id, tenant = self._builder().response_id, self.accepted.tenant
            answer = await self._store.current(await self._store.find(response_id, tenant))
        return json_response(answer, headers={REQUEST_ID: self.accepted.public_id})

    async def whole(self, opened: OpenStream) -> Json:
        async with opened as deltas:
            await self._put()
            parts = await deltas.read_all()
        answer = await build_whole(self.service.threads, self.accepted, self._builder(), parts, deltas.outcome)
        await self._settle(answer)
        return answer

    async def send(self, sse: SseStream, opened: OpenStream) -> None:
        """Raise errors before the record is stored; send later ones as the response's last event."""
        builder = self._builder()
        is_stored = is_sent = False
        try:
            async with opened as deltas, sse.kept_alive():
                await self._put()
                is_stored = True
                await sse.send(builder.opening())
                async for arrived in deltas:
                    chunks = (chunk for delta in arrived for chunk in builder.chunks(delta))
                    await sse.send(chunks, more=deltas.has_ended)
                events = builder.closing(deltas.outcome)
                await sse.send(events)
                is_sent = True
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not is_stored:
                raise
            if not is_sent:
                events = builder.failure(as_request_error(error))
                await sse.send(events)
        await self._settle(response_of(events))

    def _builder(self) -> ResponsesBuilder:
        return responses_builder_of(self.service.model, self.accepted)

    async def _put(self) -> None:
        if self._owned is not None:
            await self._store.put(self._owned)

    async def _settle(self, answer: Json) -> None:
        if self._owned is not None:
            await self._store.settle(self._owned, answer)

    @property
    def _owned(self) -> StoredResponse | None:
        """The record, unless `keep` stores it."""
        return None if self.accepted.request.outlives_client else self._record


async def _read_response(builder: ResponsesBuilder, deltas: ResponseStream) -> Json:
    async for arrived in deltas:
        for delta in arrived:
            builder.chunks(delta)
    return response_of(builder.closing(deltas.outcome))


def _count_tokens(model: ServedModel, request: GenerationRequest) -> int:
    model.check_tools(request.tools)
    return sum(len(model.encode(prompt, request.add_special_tokens)) for prompt in request.prompts)


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
    whole = read_request(RESPONSES, {**fields, "input": [*context, *items]})
    _check_items(fields, context, items)
    return replace(whole, source=request.source)


def _check_items(fields: Mapping[str, Any], context: list[Json], items: list[Json]) -> None:
    check_answered_calls([*context, *items])
    if fields.get("store") is not False:
        check_size(context, items)


def _starting_after(http: web.Request) -> int:
    """Return the number of events that the client has. Raises RequestError (400)."""
    text = http.query.get("starting_after")
    if text is None:
        return last_event_id(http)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise refusal("starting_after", "must be the sequence number of an event")
    return int(text) + 1

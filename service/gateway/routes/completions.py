"""`/v1/completions`, `/v1/chat/completions`, and requests as resources under `/v1/requests`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.request import MESSAGES
from service.gateway.core.request_store import RequestState
from service.gateway.core.service import InferenceService
from service.gateway.endpoints import builder_of
from service.gateway.http.middleware import BODY_RESERVATION, REQUEST_ID, TENANT, json_response, read_body
from service.gateway.http.sse import ClientGone, SseStream
from service.gateway.openai.json_objects import Json, error_json, error_object
from service.gateway.openai.request_reader import parse_body
from service.gateway.openai.response_builder import build_whole
from service.gateway.routes.generation import (
    LAST_EVENT_ID,
    Generation,
    OpenStream,
    accept,
    answer_new,
    as_request_error,
    idempotency_key,
    last_event_id,
    stream,
    wants_stream,
)
from service.gateway.routes.messages import MessageGeneration

REQUEST_ROUTE = "/v1/requests/{id}"


class Completions:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def create(self, endpoint: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            return await self.generate(http, endpoint, await read_body(http))

        return handle

    async def generate(self, http: web.Request, endpoint: str, body: bytes) -> web.StreamResponse:
        """Serve a request whose body was read. `endpoint`: COMPLETIONS or CHAT."""
        key, after = idempotency_key(http), last_event_id(http)
        self._service.pressure.check_unread(http[TENANT])
        request = await parse_body(self._service.threads, endpoint, body, http[TENANT])
        accepted = await accept(http, self._service, request, key)
        http[BODY_RESERVATION].shrink(len(accepted.request.source.outline))
        return await answer_new(http, _Completion(self._service, accepted), after)

    async def get(self, http: web.Request) -> web.StreamResponse:
        """Return a request's state, or its events if requested."""
        accepted = await self._service.find(http.match_info["id"], http[TENANT])
        accepts = http.headers.get("Accept", "").lower()
        if wants_stream(http) or "text/event-stream" in accepts or LAST_EVENT_ID in http.headers:
            kind = MessageGeneration if accepted.request.endpoint == MESSAGES else _Completion
            completion = kind(self._service, accepted)
            return await stream(http, completion, self._service.view(accepted), last_event_id(http))
        return await _state_response(self._service, accepted)

    async def delete(self, http: web.Request) -> web.Response:
        """Cancel an open request."""
        accepted = await self._service.find(http.match_info["id"], http[TENANT])
        await self._service.cancel(accepted)
        state = await self._service.state(accepted)
        body = await state_json(self._service, accepted, state)
        return json_response({**body, "status": "cancelling"} if state.is_open else body)


class _Completion(Generation):
    async def background_answer(self) -> web.StreamResponse:
        was_accepted = bool(self.accepted.jobs)
        return await _state_response(self.service, self.accepted, 202, was_accepted=was_accepted)

    async def whole(self, opened: OpenStream) -> Json:
        async with opened as deltas:
            parts = await deltas.read_all()
        builder = builder_of(self.service.model, self.accepted)
        return await build_whole(self.service.threads, self.accepted, builder, parts, deltas.outcome)

    async def send(self, sse: SseStream, opened: OpenStream) -> None:
        try:
            await self._send_chunks(sse, opened)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not sse.started:
                raise
            if not sse.is_done:
                await sse.send_unnumbered([error_json(as_request_error(error))])

    async def _send_chunks(self, sse: SseStream, opened: OpenStream) -> None:
        builder = builder_of(self.service.model, self.accepted)
        # The deltas of several jobs interleave in an order that no other gateway could reproduce.
        send = sse.send if len(self.accepted.job_ids) == 1 else sse.send_unnumbered
        async with opened as deltas, sse.kept_alive():
            async for arrived in deltas:
                chunks = (chunk for delta in arrived for chunk in builder.chunks(delta))
                await send(chunks, more=deltas.has_ended)
            await send(builder.closing(deltas.outcome), more=True)
            await sse.done()


async def state_json(service: InferenceService, accepted: AcceptedRequest, state: RequestState) -> Json:
    """Return a request's state, with `response` or `error` once it ended."""
    response = None
    if state.outcome is not None:
        builder = builder_of(service.model, accepted)
        response = await build_whole(service.threads, accepted, builder, state.deltas, state.outcome)
    return {
        "id": accepted.request_id,
        "object": "request",
        "endpoint": accepted.request.endpoint,
        "created": int(accepted.created_s),
        "background": accepted.request.background,
        "queue_position": state.queue_position,
        "error": None if state.error is None else error_object(state.error),
        "response": response,
        "status": state.status,
    }


async def _state_response(
    service: InferenceService, accepted: AcceptedRequest, status: int = 200, *, was_accepted: bool = False
) -> web.Response:
    location = (service.settings.root_path or "") + REQUEST_ROUTE.replace("{id}", accepted.request_id)
    headers = {REQUEST_ID: accepted.public_id, "Location": location}
    state = await service.state(accepted, was_accepted=was_accepted)
    return json_response(await state_json(service, accepted, state), status, headers)

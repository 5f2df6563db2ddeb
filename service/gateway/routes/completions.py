"""The routes that generate, and those of requests as resources: whole answers, streams, streams taken up again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from aiohttp import web

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.service import InferenceService, incident
from service.gateway.core.whole_answers import whole_answer
from service.gateway.generation.refusals import refusal
from service.gateway.generation.response_stream import ResponseStream
from service.gateway.http.middleware import ACCEPTED, BODY_RESERVATION, REQUEST_ID, TENANT, json_response, read_body
from service.gateway.http.sse import ClientGone, SseStream
from service.gateway.openai.answers import error_json

KEEP_ALIVE_S = 15.0
REQUEST_ROUTE = "/v1/requests/{id}"
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"


class Completions:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def create(self, endpoint: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            return await self.generate(http, endpoint, await read_body(http))

        return handle

    async def generate(self, http: web.Request, endpoint: str, body: bytes) -> web.StreamResponse:
        """What `endpoint` answers to a body that is read."""
        key, after = idempotency_key(http), last_event_id(http)
        self._service.pressure.refuse_at_once(http[TENANT])
        request = await self._service.read(endpoint, body, http[TENANT])
        if key is not None and not request.background:
            request = replace(request, resumable=True)
        accepted = await self._service.accept(request, http[TENANT], key)
        http[ACCEPTED] = accepted.request_id
        http[BODY_RESERVATION].shrink(len(accepted.request.source.outline))
        if not accepted.request.stays:
            return await self._answer(http, accepted, self._service.open(accepted), 0)
        if not accepted.came_before:
            after = 0
        if accepted.jobs:
            await self._service.keep(accepted)
        if accepted.request.background:
            return await self._state(accepted, 202, was_accepted=bool(accepted.jobs))
        return await self._answer(http, accepted, self._service.view(accepted), after)

    async def get(self, http: web.Request) -> web.StreamResponse:
        """The request's state, or its events where a stream is asked for."""
        accepted = await self._service.find(http.match_info["id"], http[TENANT])
        accept = http.headers.get("Accept", "").lower()
        if wants_stream(http) or "text/event-stream" in accept or LAST_EVENT_ID in http.headers:
            return await self._stream(http, accepted, self._service.view(accepted), last_event_id(http))
        return await self._state(accepted)

    async def delete(self, http: web.Request) -> web.Response:
        """Cancels the request, unless it has ended."""
        accepted = await self._service.find(http.match_info["id"], http[TENANT])
        await self._service.cancel(accepted)
        state = await self._service.state(accepted)
        if state["status"] in ("queued", "in_progress"):
            state["status"] = "cancelling"
        return json_response(state)

    async def _state(self, accepted: AcceptedRequest, status: int = 200, *, was_accepted: bool = False) -> web.Response:
        headers = {REQUEST_ID: accepted.request_id, "Location": REQUEST_ROUTE.replace("{id}", accepted.request_id)}
        return json_response(await self._service.state(accepted, was_accepted=was_accepted), status, headers)

    async def _answer(
        self,
        http: web.Request,
        accepted: AcceptedRequest,
        opened: AbstractAsyncContextManager[ResponseStream],
        after: int,
    ) -> web.StreamResponse:
        if accepted.request.stream:
            return await self._stream(http, accepted, opened, after)
        async with opened as stream:
            deltas = [delta async for delta in stream]
        body = await whole_answer(
            self._service.threads, accepted, self._service.builder(accepted), deltas, stream.outcome
        )
        return json_response(body, headers={REQUEST_ID: accepted.request_id})

    async def _stream(
        self,
        http: web.Request,
        accepted: AcceptedRequest,
        opened: AbstractAsyncContextManager[ResponseStream],
        after: int,
    ) -> web.StreamResponse:
        if after and len(accepted.job_ids) > 1:
            raise refusal(LAST_EVENT_ID, "cannot be given for a request with several prompts")
        sse = sse_of(http, accepted, self._service.settings, after)
        if http.method == "HEAD":
            return sse.response
        try:
            try:
                await self._send_deltas(sse, accepted, opened)
            except (ClientGone, asyncio.CancelledError):
                raise
            except Exception as error:
                if not sse.started:
                    raise
                if sse.is_done:
                    return sse.response
                shown = error if isinstance(error, RequestError) else incident(error, "stream")
                await sse.send_unnumbered(error_json(shown))
        except ClientGone:
            pass  # its job is cancelled already, or goes on without it; nobody is left to hear of it
        return sse.response

    async def _send_deltas(
        self, sse: SseStream, accepted: AcceptedRequest, opened: AbstractAsyncContextManager[ResponseStream]
    ) -> None:
        builder = self._service.builder(accepted)
        # Several jobs tell their news in whatever order it comes, which no other gateway could repeat.
        send = sse.send if len(accepted.job_ids) == 1 else sse.send_unnumbered
        async with opened as stream, sse.kept_alive():
            async for delta in stream:
                for chunk in builder.chunks(delta):
                    await send(chunk)
            for chunk in builder.closing(stream.outcome):
                await send(chunk)
            await sse.done()


def idempotency_key(http: web.Request) -> str | None:
    """Raises RequestError (400) for one that is no reasonable name."""
    key = http.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        raise refusal(IDEMPOTENCY_KEY, "must be 1 to 255 visible ASCII characters")
    return key


def refuse_idempotency_key(http: web.Request) -> None:
    """Of a route whose requests cannot be found again. Raises RequestError (400)."""
    if IDEMPOTENCY_KEY in http.headers:
        raise refusal(IDEMPOTENCY_KEY, "is for completions, chats and responses")


def wants_stream(http: web.Request) -> bool:
    """Whether the query asks for events. Raises RequestError (400) for a word that says neither."""
    word = http.query.get("stream", "false")
    if word not in ("true", "false"):
        raise refusal("stream", "must be true or false")
    return word == "true"


def last_event_id(http: web.Request) -> int:
    """Number of the last event that the client has; 0: none. Raises RequestError (400)."""
    text = http.headers.get(LAST_EVENT_ID, "0")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise refusal(LAST_EVENT_ID, "must be the id of an event")
    return int(text)


def sse_of(http: web.Request, accepted: AcceptedRequest, settings: Settings, after: int) -> SseStream:
    """What tells an admitted request, from behind event `after` on."""
    return SseStream(
        http,
        headers={REQUEST_ID: accepted.request_id},
        write_timeout_s=settings.write_timeout,
        keep_alive_s=KEEP_ALIVE_S,
        after=after,
    )

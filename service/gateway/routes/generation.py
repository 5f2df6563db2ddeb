"""Steps shared by generating routes: headers, admission, background, whole or streamed responses."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace

from aiohttp import web

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.refusals import incident, refusal
from service.gateway.core.request import MESSAGES, GenerationRequest
from service.gateway.core.response_stream import ResponseStream
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import ACCEPTED, ANTHROPIC_REQUEST_ID, REQUEST_ID, TENANT, client_id, json_response
from service.gateway.http.sse import ClientGone, SseStream
from service.gateway.openai.json_objects import Json

KEEP_ALIVE_S = 15.0
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"

OpenStream = AbstractAsyncContextManager[ResponseStream]


class Generation(ABC):
    """Serves one accepted request."""

    def __init__(self, service: InferenceService, accepted: AcceptedRequest) -> None:
        self.service = service
        self.accepted = accepted

    async def keep(self) -> None:
        """Queue the jobs of a request that outlives its client. Raises RequestError."""
        await self.service.keep(self.accepted)

    @abstractmethod
    async def background_answer(self) -> web.StreamResponse | None:
        """Return the response to a background request; None: stream it."""

    @abstractmethod
    async def whole(self, opened: OpenStream) -> Json:
        """Return the response as one object. Raises RequestError."""

    @abstractmethod
    async def send(self, sse: SseStream, opened: OpenStream) -> None:
        """Send the response as events. Raises RequestError before the first event, ClientGone."""


async def accept(
    http: web.Request, service: InferenceService, request: GenerationRequest, key: str | None
) -> AcceptedRequest:
    """Admit a request that can be found again; with a key it outlives its client.

    As in vLLM, a client id in the header takes precedence over one in the body.
    """
    request = replace(request, client_id=client_id(http) or request.client_id)
    if key is not None and not request.background:
        request = replace(request, resumable=True)
    accepted = await service.accept(request, http[TENANT], key)
    http[ACCEPTED] = accepted.public_id
    return accepted


async def answer_new(http: web.Request, generation: Generation, after: int) -> web.StreamResponse:
    """Serve a request from `accept`. `after`: number of the client's last event."""
    service, accepted = generation.service, generation.accepted
    if not accepted.request.outlives_client:
        return await answer(http, generation, service.open(accepted), 0)
    if accepted.jobs:
        await generation.keep()
    if accepted.request.background:
        response = await generation.background_answer()
        if response is not None:
            return response
    return await answer(http, generation, service.view(accepted), after if accepted.is_repeat else 0)


async def answer(http: web.Request, generation: Generation, opened: OpenStream, after: int) -> web.StreamResponse:
    """Respond with events if the request streams, else with one object."""
    if generation.accepted.request.stream:
        return await stream(http, generation, opened, after)
    return json_response(await generation.whole(opened), headers={REQUEST_ID: generation.accepted.public_id})


async def stream(http: web.Request, generation: Generation, opened: OpenStream, after: int) -> web.StreamResponse:
    """Respond with the events after number `after`."""
    if after and len(generation.accepted.job_ids) > 1:
        raise refusal(LAST_EVENT_ID, "cannot be given for a request with several prompts")
    sse = _sse_of(http, generation.accepted, generation.service.settings, after)
    if http.method == "HEAD":
        return sse.response
    with suppress(ClientGone):  # the job is cancelled, or continues without the client
        await generation.send(sse, opened)
    return sse.response


def as_request_error(error: Exception) -> RequestError:
    """Return the error to send in a begun stream."""
    return error if isinstance(error, RequestError) else incident(error, "stream")


def idempotency_key(http: web.Request) -> str | None:
    """Return the key, if any. Raises RequestError (400) for an invalid one."""
    key = http.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        raise refusal(IDEMPOTENCY_KEY, "must be 1 to 255 visible ASCII characters")
    return key


def refuse_idempotency_key(http: web.Request) -> None:
    """Raises RequestError (400) for a key on a route whose requests cannot be found again."""
    if IDEMPOTENCY_KEY in http.headers:
        raise refusal(IDEMPOTENCY_KEY, "is for completions, chats, responses and messages")


def wants_stream(http: web.Request) -> bool:
    """Return the query's `stream`. Raises RequestError (400) unless it is true or false."""
    word = http.query.get("stream", "false")
    if word not in ("true", "false"):
        raise refusal("stream", "must be true or false")
    return word == "true"


def last_event_id(http: web.Request) -> int:
    """Return the number of the client's last event; 0: none. Raises RequestError (400)."""
    text = http.headers.get(LAST_EVENT_ID, "0")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise refusal(LAST_EVENT_ID, "must be the id of an event")
    return int(text)


def _sse_of(http: web.Request, accepted: AcceptedRequest, settings: Settings, after: int) -> SseStream:
    names = [REQUEST_ID, *([ANTHROPIC_REQUEST_ID] if accepted.request.endpoint == MESSAGES else [])]
    return SseStream(
        http,
        headers=dict.fromkeys(names, accepted.public_id),
        write_timeout_s=settings.write_timeout,
        keep_alive_s=KEEP_ALIVE_S,
        after=after,
    )

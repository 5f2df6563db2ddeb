"""SageMaker's one route: a chat, a completion or embeddings, as the body has `messages`, `prompt` or `input`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from service.gateway.core.service import SMALL_BODY_BYTES, InferenceService
from service.gateway.generation.refusals import refusal
from service.gateway.generation.request import CHAT, COMPLETIONS, EMBEDDINGS
from service.gateway.http.middleware import TENANT, read_body
from service.gateway.routes.completions import Completions
from service.gateway.routes.embeddings import Embeddings

INVOCATIONS = "/invocations"


_ABSENT = msgspec.Raw()


class _Fields(msgspec.Struct):
    """What tells bodies apart; left unread."""

    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT


class Invocations:
    def __init__(self, service: InferenceService, completions: Completions, embeddings: Embeddings) -> None:
        self._service = service
        self._completions = completions
        self._embeddings = embeddings

    def routes(self) -> list[web.RouteDef]:
        return [web.post(INVOCATIONS, self._invoke)]

    async def _invoke(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http)
        if len(body) <= SMALL_BODY_BYTES:
            endpoint = _endpoint_of(body)
        else:
            endpoint = await self._service.threads.run(http[TENANT], _endpoint_of, body)
        if endpoint == EMBEDDINGS:
            return await self._embeddings.embed(http, body)
        return await self._completions.generate(http, endpoint, body)


def _endpoint_of(body: bytes) -> str:
    """The endpoint that the body is for. Raises RequestError (400) where it is for none."""
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (ValueError, RecursionError):
        return CHAT  # where it is said what is wrong with it
    found = {CHAT: fields.messages, COMPLETIONS: fields.prompt, EMBEDDINGS: fields.input}
    for endpoint, value in found.items():
        if bytes(value) not in (b"", b"null"):
            return endpoint
    raise refusal("messages", "or 'prompt' or 'input' must be given, one of them")

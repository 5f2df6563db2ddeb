"""SageMaker's `/invocations`: a chat, completion or embedding request, chosen by `messages`, `prompt` or `input`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from service.gateway.core.refusals import refusal
from service.gateway.core.request import CHAT, COMPLETIONS, EMBEDDINGS
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import TENANT, read_body
from service.gateway.routes.completions import Completions
from service.gateway.routes.embeddings import Embeddings
from service.typed_decoding import decode_json

INVOCATIONS = "/invocations"

_ABSENT = msgspec.Raw()


class _Fields(msgspec.Struct):
    """The fields that determine the endpoint, undecoded."""

    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT


class Invocations:
    def __init__(self, service: InferenceService, completions: Completions, embeddings: Embeddings) -> None:
        self._service = service
        self._completions = completions
        self._embeddings = embeddings

    async def invoke(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http)
        endpoint = await self._service.threads.run_sized(len(body), http[TENANT], _endpoint_of, body)
        if endpoint == EMBEDDINGS:
            return await self._embeddings.embed(http, body)
        return await self._completions.generate(http, endpoint, body)


def _endpoint_of(body: bytes) -> str:
    try:
        fields = decode_json(body, _Fields)
    except (ValueError, RecursionError):
        return CHAT  # its reader reports the error
    found = {CHAT: fields.messages, COMPLETIONS: fields.prompt, EMBEDDINGS: fields.input}
    for endpoint, value in found.items():
        if bytes(value) not in (b"", b"null"):
            return endpoint
    raise refusal("messages", "is required, or 'prompt' or 'input' in its place")

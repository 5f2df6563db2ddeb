"""`/v1/embeddings` and vLLM's `/pooling`: texts as vectors, pooled from the served model's hidden states."""

from __future__ import annotations

import base64

import msgspec
from aiohttp import web

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.dispatcher import read_to_end
from service.gateway.core.request import EMBEDDINGS, POOLING
from service.gateway.core.response_stream import ResponseStream
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import ACCEPTED, TENANT, client_id, json_response, read_body
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_reader import parse_body
from service.gateway.openai.responses.request_reader import with_own_field_names
from service.gateway.routes.generation import refuse_idempotency_key
from service.queue.codec import unpack_floats


class Embeddings:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def create(self, http: web.Request) -> web.Response:
        self.check(http)
        return await self.embed(http, await read_body(http))

    async def embed(self, http: web.Request, body: bytes) -> web.Response:
        """Serve a request whose body was read."""
        self.check(http)
        accepted, stream = await self.finished(http, EMBEDDINGS, body)
        return json_response(await embedding_answer(self._service, accepted, stream))

    async def pool(self, http: web.Request) -> web.Response:
        self.check(http)
        accepted, stream = await self.finished(http, POOLING, await read_body(http))
        return json_response(_pooled(accepted, await embedding_answer(self._service, accepted, stream)))

    def check(self, http: web.Request) -> None:
        """Raises RequestError: 404 if embeddings are not enabled, 400 for an Idempotency-Key."""
        require_enabled(self._service.settings)
        refuse_idempotency_key(http)

    async def finished(self, http: web.Request, endpoint: str, body: bytes) -> tuple[AcceptedRequest, ResponseStream]:
        """Run a request until it succeeds. Raises RequestError."""
        request = await parse_body(self._service.threads, endpoint, body, http[TENANT])
        try:
            accepted = await self._service.admit(request, http[TENANT])
        except RequestError as error:
            raise with_own_field_names(error) from None
        http[ACCEPTED] = client_id(http) or accepted.request_id
        async with self._service.open(accepted) as stream:
            await read_to_end(stream)
        return accepted, stream


def require_enabled(settings: Settings) -> None:
    """Raises RequestError (404) without --enable-embeddings."""
    if not settings.enable_embeddings:
        raise RequestError(404, "Embeddings are not enabled here (--enable-embeddings).", code="embeddings_disabled")


async def embedding_answer(service: InferenceService, accepted: AcceptedRequest, stream: ResponseStream) -> Json:
    """Return the response of a successful request."""
    in_base64 = msgspec.json.decode(accepted.request.source.outline).get("encoding_format") == "base64"
    data = await service.threads.run(accepted.tenant, _vectors_json, stream.embeddings, in_base64)
    num_tokens = sum(accepted.num_prompt_tokens)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": service.model.answer_name(accepted.request.model), "usage": usage}


def _vectors_json(vectors: list[bytes], in_base64: bool) -> list[Json]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector).decode() if in_base64 else unpack_floats(vector),
        }
        for index, vector in enumerate(vectors)
    ]


def _pooled(accepted: AcceptedRequest, answer: Json) -> Json:
    data = [{"index": one["index"], "object": "pooling", "data": one["embedding"]} for one in answer["data"]]
    usage = {**answer["usage"], "completion_tokens": 0, "prompt_tokens_details": None}
    head = {"id": f"pool-{accepted.request_id}", "created": int(accepted.created_s)}
    return {**head, **answer, "data": data, "usage": usage}

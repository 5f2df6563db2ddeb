"""`/v1/embeddings` and vLLM's `/pooling`: texts as vectors, the hidden states of the model that is served, pooled."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from aiohttp import web

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import Ticket
from service.gateway.core.service import Hall
from service.gateway.generation.request import EMBEDDINGS, POOLING
from service.gateway.generation.response_stream import Run
from service.gateway.http.middleware import ACCEPTED, TENANT, json_response, read_body
from service.gateway.openai.response_bodies import in_own_words
from service.gateway.routes.completions import refuse_idempotency_key
from service.queue.codec import unpack_floats

Json = dict[str, Any]


class Embeddings:
    def __init__(self, hall: Hall) -> None:
        self._hall = hall

    def routes(self) -> list[web.RouteDef]:
        return [web.post(EMBEDDINGS, self._create), web.post(POOLING, self._pool)]

    async def _create(self, http: web.Request) -> web.Response:
        self._check(http)
        return await self.embed(http, await read_body(http))

    async def embed(self, http: web.Request, body: bytes) -> web.Response:
        """The answer to a body that is read."""
        self._check(http)
        ticket, run = await self._run(http, EMBEDDINGS, body)
        return json_response(await embedding_answer(self._hall, ticket, run))

    async def _pool(self, http: web.Request) -> web.Response:
        self._check(http)
        ticket, run = await self._run(http, POOLING, await read_body(http))
        return json_response(_pooled(ticket, await embedding_answer(self._hall, ticket, run)))

    def _check(self, http: web.Request) -> None:
        require_enabled(self._hall.settings)
        refuse_idempotency_key(http)

    async def _run(self, http: web.Request, endpoint: str, body: bytes) -> tuple[Ticket, Run]:
        """A request that has ended well."""
        request = await self._hall.read(endpoint, body, http[TENANT])
        try:
            ticket = await self._hall.admit(request, http[TENANT])
        except RequestError as error:
            raise in_own_words(error) from None
        http[ACCEPTED] = ticket.request_id
        async with self._hall.open(ticket) as run:
            async for _ in run:
                pass
        return ticket, run


def require_enabled(settings: Settings) -> None:
    """Raises RequestError (404) where nobody has asked for embeddings."""
    if not settings.enable_embeddings:
        raise RequestError(404, "Embeddings are not enabled here (--enable-embeddings).", code="embeddings_disabled")


async def embedding_answer(hall: Hall, ticket: Ticket, run: Run) -> Json:
    """The answer of a request that has ended well."""
    in_base64 = msgspec.json.decode(ticket.request.source.outline).get("encoding_format") == "base64"
    data = await hall.threads.run(ticket.tenant, _worded, run.embeddings, in_base64)
    num_tokens = sum(ticket.num_prompt_tokens)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": hall.model.name, "usage": usage}


def _worded(vectors: list[bytes], in_base64: bool) -> list[Json]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector).decode() if in_base64 else unpack_floats(vector),
        }
        for index, vector in enumerate(vectors)
    ]


def _pooled(ticket: Ticket, answer: Json) -> Json:
    """The same in vLLM's shape."""
    data = [{"index": one["index"], "object": "pooling", "data": one["embedding"]} for one in answer["data"]]
    usage = {**answer["usage"], "completion_tokens": 0, "prompt_tokens_details": None}
    return {"id": f"pool-{ticket.request_id}", "created": int(ticket.created_s), **answer, "data": data, "usage": usage}

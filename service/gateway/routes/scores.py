"""vLLM's `/score` and `/rerank`: the cosine of the embeddings of two texts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import TypeVar

import msgspec
from aiohttp import web

from service.errors import RequestError
from service.gateway.core.refusals import refusal
from service.gateway.core.request import EMBEDDINGS
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import TENANT, json_response, read_body
from service.gateway.openai.json_objects import Json
from service.gateway.openai.request_bodies import convert
from service.gateway.openai.strict_json import decode_object
from service.gateway.routes.embeddings import Embeddings
from service.queue.codec import unpack_floats

SCORE = "/v1/score"
RERANK = "/v1/rerank"
SCORE_PATHS = ("/score", SCORE)
RERANK_PATHS = ("/rerank", RERANK, "/v2/rerank")


class SharedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None
    priority: int = 0
    user: str = ""


class ScoreBody(SharedBody, frozen=True):
    text_1: str | list[str]
    text_2: str | list[str]


class RerankBody(SharedBody, frozen=True):
    query: str
    documents: list[str]
    top_n: int = 0
    return_documents: bool = True


Body = TypeVar("Body", bound=SharedBody)


class Scores:
    def __init__(self, service: InferenceService, embeddings: Embeddings) -> None:
        self._service = service
        self._embeddings = embeddings

    async def score(self, http: web.Request) -> web.Response:
        """Score each pair; one text on the left is compared with all on the right."""
        self._embeddings.check(http)
        body = await self._read(http, ScoreBody)
        left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
        right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
        if len(left) not in (1, len(right)):
            raise refusal("text_1", "must be one text, or as many as 'text_2'")
        head, scores = await self._scores(http, body, left, right)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return json_response({**head, "object": "list", "data": data})

    async def rerank(self, http: web.Request) -> web.Response:
        """Score a query against documents; the best come first."""
        self._embeddings.check(http)
        body = await self._read(http, RerankBody)
        if body.top_n < 0:
            raise refusal("top_n", "must be at least 0, which returns all")
        head, scores = await self._scores(http, body, [body.query], body.documents)
        best = sorted(enumerate(scores), key=lambda pair: -pair[1])[: body.top_n or None]
        results = []
        for index, score in best:
            shown = {"document": {"text": body.documents[index]}} if body.return_documents else {}
            results.append({"index": index, **shown, "relevance_score": score})
        return json_response({**head, "results": results})

    async def _read(self, http: web.Request, kind: type[Body]) -> Body:
        data = await read_body(http)
        return await self._service.threads.run_sized(len(data), http[TENANT], _decode, data, kind)

    async def _scores(
        self, http: web.Request, body: SharedBody, left: list[str], right: list[str]
    ) -> tuple[Json, list[float]]:
        if not right:
            raise refusal(_name_of_right(body), "must not be empty")
        shared = {name: getattr(body, name) for name in SharedBody.__struct_fields__}
        data = msgspec.json.encode({**shared, "input": [*left, *right]})
        try:
            accepted, stream = await self._embeddings.finished(http, EMBEDDINGS, data)
        except RequestError as error:
            raise _in_own_words(error, body) from None
        scores = await self._service.threads.run(http[TENANT], _cosines, stream.embeddings, len(left))
        num_tokens = sum(accepted.num_prompt_tokens)
        head = {
            "id": f"score-{accepted.request_id}",
            "created": int(accepted.created_s),
            "model": self._service.model.answer_name(accepted.request.model),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return head, scores


def _decode(data: bytes, kind: type[Body]) -> Body:
    return convert(decode_object(data), kind)


def _cosines(embeddings: Sequence[bytes], num_left: int) -> list[float]:
    """Return the product of each vector on the right with its own, or the only, one on the left: all have length 1."""
    vectors = [unpack_floats(one) for one in embeddings]
    left, right = vectors[:num_left], vectors[num_left:]
    return [sum(map(mul, left[index % num_left], vector)) for index, vector in enumerate(right)]


def _in_own_words(error: RequestError, body: SharedBody) -> RequestError:
    if error.param != "input":
        return error
    own = _name_of_right(body)
    message = error.message.replace("'input'", f"'{own}'")
    return RequestError(error.status, message, error.type, own, error.code, error.retry_after_s)


def _name_of_right(body: SharedBody) -> str:
    return "documents" if isinstance(body, RerankBody) else "text_2"

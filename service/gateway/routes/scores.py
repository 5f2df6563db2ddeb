"""vLLM's `/score` and `/rerank`: cosine similarity of two texts' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import TypeAlias, TypeVar

import msgspec
from aiohttp import web

from service.errors import RequestError
from service.gateway.core.refusals import missing, refusal
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
SPELLINGS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
SIDES = frozenset(name for spelling in SPELLINGS for name in spelling)


class SharedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None
    priority: int = 0
    user: str = ""


Texts: TypeAlias = str | list[str]


class ScoreBody(SharedBody, frozen=True):
    """Both sides in one of vLLM's spellings."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None

    def names(self) -> tuple[str, str]:
        """Return the names of the left and right fields. Raises RequestError."""
        given = [name for name in ScoreBody.__struct_fields__ if name in SIDES and getattr(self, name) is not None]
        spelling = next((pair for pair in SPELLINGS if set(given) <= set(pair)), None)
        if spelling is None:
            raise refusal(given[-1], f"cannot go with '{given[0]}'")
        for name in spelling:
            if name not in given:
                raise missing(name)
        return spelling


class Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    text: str


class RerankBody(SharedBody, frozen=True):
    query: str
    documents: list[str | Document]
    top_n: int = 0
    return_documents: bool = True


Body = TypeVar("Body", bound=SharedBody)


class Scores:
    def __init__(self, service: InferenceService, embeddings: Embeddings) -> None:
        self._service = service
        self._embeddings = embeddings

    async def score(self, http: web.Request) -> web.Response:
        """Score each pair; a single left text is compared with all right ones."""
        self._embeddings.check(http)
        body = await self._read(http, ScoreBody)
        names = body.names()
        left, right = (_listed(getattr(body, name)) for name in names)
        if len(left) not in (1, len(right)):
            raise refusal(names[0], f"must be one text, or as many as '{names[1]}'")
        head, scores = await self._scores(http, body, left, right, names[1])
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return json_response({**head, "object": "list", "data": data})

    async def rerank(self, http: web.Request) -> web.Response:
        """Score a query against documents, best first."""
        self._embeddings.check(http)
        body = await self._read(http, RerankBody)
        if body.top_n < 0:
            raise refusal("top_n", "must be at least 0, which returns all")
        documents = [one if isinstance(one, str) else one.text for one in body.documents]
        head, scores = await self._scores(http, body, [body.query], documents, "documents")
        best = sorted(enumerate(scores), key=lambda pair: -pair[1])[: body.top_n or None]
        results = []
        for index, score in best:
            shown = {"document": {"text": documents[index]}} if body.return_documents else {}
            results.append({"index": index, **shown, "relevance_score": score})
        return json_response({**head, "results": results})

    async def _read(self, http: web.Request, kind: type[Body]) -> Body:
        data = await read_body(http)
        return await self._service.threads.run_sized(len(data), http[TENANT], _decode, data, kind)

    async def _scores(
        self, http: web.Request, body: SharedBody, left: list[str], right: list[str], name_of_right: str
    ) -> tuple[Json, list[float]]:
        if not right:
            raise refusal(name_of_right, "must not be empty")
        shared = {name: getattr(body, name) for name in SharedBody.__struct_fields__}
        data = msgspec.json.encode({**shared, "input": [*left, *right]})
        try:
            accepted, stream = await self._embeddings.finished(http, EMBEDDINGS, data)
        except RequestError as error:
            raise _with_own_field_names(error, name_of_right) from None
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
    """Return the dot product of each right vector with its left one, or with the only one: all are unit vectors."""
    vectors = [unpack_floats(one) for one in embeddings]
    left, right = vectors[:num_left], vectors[num_left:]
    return [sum(map(mul, left[index % num_left], vector)) for index, vector in enumerate(right)]


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _with_own_field_names(error: RequestError, own: str) -> RequestError:
    if error.param != "input":
        return error
    message = error.message.replace("'input'", f"'{own}'")
    return RequestError(error.status, message, error.type, own, error.code, error.retry_after_s)

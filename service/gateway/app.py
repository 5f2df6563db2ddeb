"""The HTTP application: the OpenAI API and the operations routes."""

from __future__ import annotations

import math
from importlib.metadata import version

from aiohttp import web

from service.gateway.batches.batches import Batches
from service.gateway.batches.files import Files
from service.gateway.batches.runner import BatchRunner
from service.gateway.core.service import InferenceService
from service.gateway.generation.request import CHAT, COMPLETIONS
from service.gateway.generation.served_model import ServedModel
from service.gateway.http.middleware import (
    READ_TIMEOUT_S,
    TENANT,
    AccessControl,
    json_response,
    make_middleware,
    read_body,
    record_begun_response,
)
from service.gateway.openapi.document import openapi_document
from service.gateway.routes.completions import REQUEST_ROUTE, Completions
from service.gateway.routes.embeddings import Embeddings
from service.gateway.routes.invocations import Invocations
from service.gateway.routes.operations_page import operations_routes
from service.gateway.routes.probes import readiness
from service.gateway.routes.responses import Responses
from service.gateway.routes.tokenization import detokenize, tokenize
from service.observability.metrics import CONTENT_TYPE, LaneStats
from service.queue.interface import QUEUE_LANES, QueueUnavailable


def model_permission(model: ServedModel) -> dict[str, object]:
    """vLLM's object; every key has the same permissions."""
    return {
        "id": model.fingerprint.replace("fp_", "modelperm-"),
        "object": "model_permission",
        "created": model.created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


class HttpDoor:
    def __init__(self, service: InferenceService, runner: BatchRunner) -> None:
        self._service = service
        self._runner = runner

    def app(self) -> web.Application:
        """Build the application. Raises StartupError for an unusable key file."""
        settings = self._service.settings
        completions, embeddings = Completions(self._service), Embeddings(self._service)
        app = web.Application(
            middlewares=[
                make_middleware(
                    AccessControl(settings), self._service.metrics, settings.write_timeout, self._service.tracing
                )
            ],
            client_max_size=settings.max_body_bytes,
        )
        app[READ_TIMEOUT_S] = settings.read_timeout
        app.on_response_prepare.append(record_begun_response)
        app.add_routes(
            [
                web.post(COMPLETIONS, completions.create(COMPLETIONS)),
                web.post(CHAT, completions.create(CHAT)),
                web.get(REQUEST_ROUTE, completions.get),
                web.delete(REQUEST_ROUTE, completions.delete),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/metrics", self._metrics),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/health", self._readyz),
                web.get("/ping", self._readyz),
                web.get("/", self._welcome),
                web.get("/openapi.json", self._openapi),
                *operations_routes(self._service),
                *Responses(self._service).routes(),
                *embeddings.routes(),
                *Invocations(self._service, completions, embeddings).routes(),
                *Files(self._service.queue, self._service.storage, settings).routes(),
                *Batches(self._service.queue, self._runner, self._service.storage).routes(),
            ]
        )
        return app

    async def _models(self, http: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [await self._card()]})

    async def _model(self, http: web.Request) -> web.Response:
        self._service.model.require(http.match_info["model"])
        return json_response(await self._card())

    async def _card(self) -> dict[str, object]:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "quire",
            "root": model.name,
            "parent": None,
            "max_model_len": await self._max_model_len(),
            "permission": [model_permission(model)],
        }

    async def _max_model_len(self) -> int:
        """Return the workers' limit, the model's if none can be reached."""
        limit = self._service.model.max_model_len
        try:
            return (await self._service.fleet.view()).max_model_len(limit)
        except QueueUnavailable:
            return limit

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        found = await self._service.threads.run(http[TENANT], tokenize, self._service.model, body)
        return json_response({**found, "max_model_len": await self._max_model_len()})

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        return json_response(await self._service.threads.run(http[TENANT], detokenize, self._service.model, body))

    async def _metrics(self, http: web.Request) -> web.Response:
        try:
            view = await self._service.fleet.view()
            lanes = {
                name: LaneStats(lane.num_jobs, view.oldest_wait_s(name)) for name, lane in view.queue.lanes.items()
            }
            stats = {card.worker_id: card.stats for card in view.cards}
            self._service.metrics.set_fleet(stats, lanes, view.queue.num_leases)
        except QueueUnavailable:
            self._service.metrics.set_fleet({}, dict.fromkeys(QUEUE_LANES, LaneStats(math.nan, math.nan)), math.nan)
        return web.Response(body=self._service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _livez(self, http: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _readyz(self, http: web.Request) -> web.Response:
        status, body = await readiness(self._service)
        return json_response(body, status)

    async def _openapi(self, http: web.Request) -> web.Response:
        settings = self._service.settings
        keys_required = bool(settings.api_key or settings.api_key_file)
        return json_response(openapi_document(version("quire"), self._service.model.name, keys_required=keys_required))

    async def _welcome(self, http: web.Request) -> web.Response:
        routes = sorted({resource.canonical for resource in http.app.router.resources()})
        return json_response({"service": "quire", "model": self._service.model.name, "routes": routes})

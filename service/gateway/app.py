"""The HTTP application. `route_table` lists all its routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version

from aiohttp import web

from service.gateway.batches.batches import Batches
from service.gateway.batches.files import Files
from service.gateway.batches.runner import BatchRunner
from service.gateway.core.request import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, POOLING, RESPONSES
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import (
    PAGE,
    READ_TIMEOUT_S,
    AccessControl,
    json_response,
    make_middleware,
    record_begun_response,
)
from service.gateway.openapi.document import openapi_document
from service.gateway.routes.adapters import LOAD, UNLOAD, LoraAdapters
from service.gateway.routes.completions import REQUEST_ROUTE, Completions
from service.gateway.routes.embeddings import Embeddings
from service.gateway.routes.invocations import INVOCATIONS, Invocations
from service.gateway.routes.messages import COUNT_TOKENS, Messages
from service.gateway.routes.models import Models
from service.gateway.routes.operations import ASSETS, PAGES, Operations, asset, without_slash
from service.gateway.routes.responses import COUNT_INPUT_TOKENS, RESPONSE_ROUTE, Responses
from service.gateway.routes.scores import RERANK_PATHS, SCORE_PATHS, Scores

_SHOWN_SETTINGS = ("max_n", "max_request_tokens", "request_timeout", "enable_embeddings", "pooling")
"""Settings that affect responses; none is secret."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    method: str
    path: str  # aiohttp's pattern
    handler: Handler
    needs_key: bool = True
    is_documented: bool = True  # in /openapi.json; the others are for people and scrapers


def route_table(service: InferenceService, runner: BatchRunner) -> list[Route]:
    completions, embeddings = Completions(service), Embeddings(service)
    invocations = Invocations(service, completions, embeddings)
    adapters = LoraAdapters(service)
    messages, scores = Messages(service), Scores(service, embeddings)
    responses, models, operations = Responses(service), Models(service), Operations(service)
    files = Files(service.queue, service.storage, service.settings)
    batches = Batches(service.queue, runner, service.storage)
    pages = _Pages(service)
    return [
        Route("POST", COMPLETIONS, completions.create(COMPLETIONS)),
        Route("POST", CHAT, completions.create(CHAT)),
        Route("GET", REQUEST_ROUTE, completions.get),
        Route("DELETE", REQUEST_ROUTE, completions.delete),
        Route("POST", RESPONSES, responses.create),
        Route("POST", COUNT_INPUT_TOKENS, responses.count_input_tokens),
        Route("GET", RESPONSE_ROUTE, responses.get),
        Route("DELETE", RESPONSE_ROUTE, responses.delete),
        Route("POST", f"{RESPONSE_ROUTE}/cancel", responses.cancel),
        Route("GET", f"{RESPONSE_ROUTE}/input_items", responses.input_items),
        Route("POST", MESSAGES, messages.create),
        Route("POST", COUNT_TOKENS, messages.count_tokens),
        Route("POST", EMBEDDINGS, embeddings.create),
        Route("POST", POOLING, embeddings.pool),
        *(Route("POST", path, scores.score) for path in SCORE_PATHS),
        *(Route("POST", path, scores.rerank) for path in RERANK_PATHS),
        Route("POST", INVOCATIONS, invocations.invoke),
        Route("POST", LOAD, adapters.load),
        Route("POST", UNLOAD, adapters.unload),
        Route("GET", "/v1/models", models.list),
        Route("GET", "/v1/models/{model:.+}", models.get),
        Route("POST", "/tokenize", models.tokenize),
        Route("POST", "/detokenize", models.detokenize),
        Route("POST", "/v1/files", files.upload),
        Route("GET", "/v1/files", files.list),
        Route("GET", "/v1/files/{file_id}", files.get),
        Route("GET", "/v1/files/{file_id}/content", files.content),
        Route("DELETE", "/v1/files/{file_id}", files.delete),
        Route("POST", "/v1/batches", batches.create),
        Route("GET", "/v1/batches", batches.list),
        Route("GET", "/v1/batches/{batch_id}", batches.get),
        Route("POST", "/v1/batches/{batch_id}/cancel", batches.cancel),
        Route("GET", "/version", pages.version),
        Route("GET", "/server_info", pages.server_info),
        Route("GET", "/livez", operations.livez, needs_key=False),
        Route("GET", "/readyz", operations.readyz, needs_key=False),
        Route("GET", "/health", operations.readyz, needs_key=False),
        Route("GET", "/ping", operations.readyz, needs_key=False),
        Route("POST", "/ping", operations.readyz, needs_key=False),
        Route("GET", "/metrics", operations.metrics, is_documented=False),
        Route("GET", "/", pages.welcome, is_documented=False),
        Route("GET", "/openapi.json", pages.openapi, is_documented=False),
        *(Route("GET", PAGE + path, asset(name, "text/html"), is_documented=False) for path, name in PAGES.items()),
        Route("GET", f"{PAGE}/", without_slash, is_documented=False),
        Route("GET", f"{PAGE}/state", operations.page_state, is_documented=False),
        Route("GET", f"{PAGE}/sequences", operations.page_sequences, is_documented=False),
        *(Route("GET", f"{PAGE}/{name}", asset(name, kind), is_documented=False) for name, kind in ASSETS.items()),
    ]


def make_app(service: InferenceService, runner: BatchRunner) -> web.Application:
    """Build the application. Raises StartupError for an unusable key file."""
    settings, routes = service.settings, route_table(service, runner)
    open_routes = frozenset(route.path for route in routes if not route.needs_key)
    middleware = make_middleware(
        AccessControl(settings, service.group), service.metrics, settings.write_timeout, open_routes, service.tracing
    )
    app = web.Application(middlewares=[middleware], client_max_size=settings.max_body_bytes)
    app[READ_TIMEOUT_S] = settings.read_timeout
    app.on_response_prepare.append(record_begun_response)
    for route in routes:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler)  # serves HEAD too
        else:
            app.router.add_route(route.method, route.path, route.handler)
    return app


class _Pages:
    """Pages about the application itself."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def welcome(self, http: web.Request) -> web.Response:
        routes = sorted({resource.canonical for resource in http.app.router.resources()})
        return json_response({"service": "quire", "model": self._service.model.name, "routes": routes})

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": version("quire")})

    async def server_info(self, _: web.Request) -> web.Response:
        settings = self._service.settings
        limits = {name: getattr(settings, name) for name in _SHOWN_SETTINGS}
        return json_response({"version": version("quire"), **self._service.model.description(), "settings": limits})

    async def openapi(self, http: web.Request) -> web.Response:
        settings = self._service.settings
        keys_required = bool(settings.api_key or settings.api_key_file)
        name, prefix = self._service.model.name, settings.root_path or ""
        document = openapi_document(version("quire"), name, keys_required=keys_required, root_path=prefix)
        return json_response(document)

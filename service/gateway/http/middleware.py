"""Who may enter over HTTP and how refusals look: hosts, keys, bodies, and OpenAI's error JSON for every error."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.back_pressure import RETRY_AFTER_S
from service.gateway.core.service import incident
from service.gateway.core.spans import TRACED, followed
from service.gateway.http.auth import KeyRing
from service.gateway.http.body_budget import BodyBudget, Hold
from service.gateway.http.host_check import HostCheck
from service.gateway.http.unread import cut_off, flush
from service.gateway.openai.answers import encode_json, error_json
from service.observability.logs import fields
from service.observability.metrics import GatewayMetrics
from service.observability.tracing import NO_TRACING, Tracing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({"/livez", "/readyz", "/health", "/ping"})
"""Patterns of the routes that need no key; every other one does, unknown ones included."""

PAGE = "/ui"
"""Opened in a browser, which asks its user for the key if the refusal says so in a way that browsers know."""

TENANT: web.RequestKey[str] = web.RequestKey("tenant", str)
ACCEPTED: web.RequestKey[str] = web.RequestKey("accepted", str)
"""The id under which a request was accepted: every answer to it tells that, an error too."""
HELD: web.RequestKey[Hold] = web.RequestKey("held", Hold)
"""What the request takes of the memory for bodies, until its answer is sent."""
REQUEST_ID = "X-Request-Id"
BEGUN: web.RequestKey[web.StreamResponse] = web.RequestKey("begun", web.StreamResponse)
"""The response whose headers are written, or about to be."""
READ_TIMEOUT_S: web.AppKey[float] = web.AppKey("read_timeout_s", float)
log = logging.getLogger("quire.gateway")

CHUNK_BYTES = 64 << 10
"""A body whose length is not told is held in steps of this size."""
LEFT = 499
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and no answer is for a page of another origin to read."""


class Doorkeeper:
    """Who may enter, by which host, and with how many requests at once."""

    def __init__(self, settings: Settings) -> None:
        """Raises StartupError for a key file that cannot be used."""
        self._keys = KeyRing(settings.api_key, settings.api_key_file)
        self._hosts = HostCheck(settings, keys_required=not self._keys.is_open)
        self._max_open = settings.max_open_per_key
        self._bodies = BodyBudget(max(settings.max_body_bytes_in_flight, 2 * settings.max_body_bytes))
        self._open: Counter[str] = Counter()

    def check_form(self, http: web.Request) -> None:
        """What even a probe must keep to. Raises RequestError (400)."""
        hosts = http.headers.getall("Host", [])
        self._hosts.require_form(hosts, http.raw_path, needs_host=http.version >= (1, 1))

    @contextmanager
    def admitted(self, http: web.Request) -> Iterator[None]:
        """Inside, the request counts as open, knows its TENANT and can hold a body. Raises RequestError: 400, 401, 403,
        429."""
        hosts, keys = http.headers.getall("Host", []), http.headers.getall("Authorization", [])
        self._hosts.require_known(hosts)
        client = self._keys.client(keys)
        if http.method not in SAFE_METHODS and not (keys and keys[0].lower().startswith("bearer ")):
            # A browser adds a password that it was told once by itself, whoever's page makes it send the request.
            self._hosts.require_own_page(http.headers.getall("Origin", []), hosts)
        http[TENANT] = client.tenant
        if not self._keys.is_open and self._open[client.name] >= (client.max_open or self._max_open):
            message = "Too many requests are open with this key."
            raise RequestError(429, message, "rate_limit_error", code="too_many_open_requests", retry_after_s=1)
        self._open[client.name] += 1
        held = self._bodies.hold(f"address {http.remote}" if self._keys.is_open else client.tenant)
        http[HELD] = held
        try:
            yield
        finally:
            held.close()
            self._open[client.name] -= 1
            if not self._open[client.name]:
                del self._open[client.name]


def guard(
    doorkeeper: Doorkeeper, metrics: GatewayMetrics, write_timeout_s: float, tracing: Tracing = NO_TRACING
) -> Callable[..., Any]:
    """The one middleware: checks host and key, words every failure as OpenAI does, and sees the answer off."""

    @web.middleware
    async def middleware(http: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(http)
        with ExitStack() as inside:
            answered = inside.enter_context(followed(tracing if route.startswith(TRACED) else NO_TRACING, http, route))
            try:
                doorkeeper.check_form(http)
                if route not in OPEN_ROUTES:
                    inside.enter_context(doorkeeper.admitted(http))
                response = await handler(http)
            except RequestError as error:
                response = error_response(error)
                if error.status == 401 and route.startswith(PAGE):
                    response.headers["WWW-Authenticate"] = 'Basic realm="Quire: the API key is the password"'
            except web.HTTPException as error:
                response = _worded(error)
            except ConnectionError:
                response = error_response(RequestError(LEFT, "The client left."))  # nobody hears it
            except asyncio.CancelledError:
                metrics.count_response(route, LEFT)
                answered(LEFT)
                raise
            except Exception as error:
                response = error_response(incident(error, route))
            response = _only_answer(http, response)
            if ACCEPTED in http and not response.prepared:
                response.headers.setdefault(REQUEST_ID, http[ACCEPTED])
            metrics.count_response(route, response.status)
            answered(response.status)
            await _see_off(http, response, write_timeout_s)
        return response

    return middleware


def worded(handler: Handler, write_timeout_s: float) -> Handler:
    """`handler`, but what aiohttp refuses before any middleware runs is worded like all else, and seen off like it."""

    async def answer(http: web.Request) -> web.StreamResponse:
        expectation = http.headers.get("Expect", "")
        if expectation and http.version >= HttpVersion11 and expectation.lower() != "100-continue":
            # aiohttp would repeat the header in its refusal, and fails where it is not UTF-8.
            return error_response(RequestError(417, "Expectation Failed."))
        try:
            return await handler(http)
        except web.HTTPException as error:
            return _worded(error)

    async def handle(http: web.Request) -> web.StreamResponse:
        response = await answer(http)
        if not response.prepared:
            await _see_off(http, response, write_timeout_s)
        return response

    return handle


async def note_begun(http: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: from now on this is the answer to the request."""
    http[BEGUN] = response


def _only_answer(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """The response, or the one that has begun before it: a second one would be written into the body of the first. That
    one is cut off, so that its client does not take what it has for the whole."""
    begun = http.get(BEGUN, response)
    if begun is not response:
        log.error("an answer was cut off %s", fields(route=route_of(http), status=response.status))
        if http.transport is not None:
            http.transport.abort()
    return begun


async def _see_off(http: web.Request, response: web.StreamResponse, timeout_s: float) -> None:
    """Writes the response, what a stream has left of it included; aiohttp would wait for ever for who does not read."""
    try:
        async with asyncio.timeout(timeout_s):
            await response.prepare(http)
            await response.write_eof()
            await flush(http)
    except TimeoutError:
        cut_off(http.transport)
    except ConnectionError:
        log.debug("client left before its answer")


def route_of(http: web.Request) -> str:
    """The pattern of the matched route."""
    resource = http.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


async def read_body(http: web.Request) -> bytes:
    """The whole JSON body. Raises RequestError: 408, 413, 415, 429, 503."""
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError(415, "An encoded body is not accepted.", code="unsupported_content_encoding")
    if http.content_type != "application/json":
        raise RequestError(415, "The body must be of type application/json.", code="unsupported_media_type")
    if (http.content_length or 0) > http.client_max_size:
        raise _too_large()
    try:
        async with asyncio.timeout(http.app[READ_TIMEOUT_S]):
            return await _bounded(http)
    except TimeoutError:
        raise RequestError(408, "The body did not arrive in time.", code="request_timeout") from None
    except web.RequestPayloadError:
        raise RequestError(400, "The body is not well-formed HTTP.", code="invalid_body") from None


async def _bounded(http: web.Request) -> bytes:
    """The body, held as far as it may have come. Raises RequestError: 413, 429, 503."""
    held, body = http[HELD], bytearray()
    await held.grow(http.content_length or 0)
    while part := await http.content.readany():
        body += part
        if len(body) > http.client_max_size:
            raise _too_large()
        if len(body) > held.num_bytes:
            await held.grow(max(len(body) - held.num_bytes, CHUNK_BYTES))
    return bytes(body)


def error_response(error: RequestError) -> web.Response:
    headers = {}
    retry_after_s = RETRY_AFTER_S if error.status == 503 and error.retry_after_s is None else error.retry_after_s
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = json_response(error_json(error), error.status, headers)
    if error.status in (408, 413):
        response.force_close()
    return response


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(data), status=status, headers=headers, content_type="application/json")


def _worded(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusal of a route or a method in OpenAI's words."""
    if error.status < 400 or error.status == 404:
        return error_response(RequestError(404, "There is no such route.", code="unknown_url"))
    response = error_response(RequestError(error.status, f"{HTTPStatus(error.status).phrase}."))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _too_large() -> RequestError:
    return RequestError(413, "The body is too large.", code="body_too_large")

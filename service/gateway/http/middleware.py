"""The middleware: host checks, keys, bodies and OpenAI's error JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.anthropic import message_builder
from service.gateway.core.accepted_request import is_client_id
from service.gateway.core.refusals import RETRY_AFTER_S, incident
from service.gateway.core.request import MESSAGES
from service.gateway.core.spans import http_span
from service.gateway.http.auth import KeyRing
from service.gateway.http.body_budget import BodyBudget, BodyReservation
from service.gateway.http.host_check import HostCheck
from service.gateway.http.slow_clients import abort_connection, drain_writes
from service.gateway.openai.json_objects import encode_json, error_json
from service.observability.gateway_group import GatewayGroup, OpenCounts
from service.observability.logs import fields
from service.observability.metrics import GatewayMetrics
from service.observability.tracing import NO_TRACING, Tracing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BaseHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

PAGE = "/ui"
"""Opened by browsers, which ask for the key on a Basic challenge."""

TENANT: web.RequestKey[str] = web.RequestKey("tenant", str)
ACCEPTED: web.RequestKey[str] = web.RequestKey("accepted", str)
"""Id of an accepted request, sent with every response, errors included."""
BODY_RESERVATION: web.RequestKey[BodyReservation] = web.RequestKey("reservation", BodyReservation)
"""Memory for the body, held until the response is sent."""
REQUEST_ID = "X-Request-Id"
ANTHROPIC_REQUEST_ID = "Request-Id"
BEGUN_RESPONSE: web.RequestKey[web.StreamResponse] = web.RequestKey("begun", web.StreamResponse)
"""The response whose headers were, or are about to be, written."""
READ_TIMEOUT_S: web.AppKey[float] = web.AppKey("read_timeout_s", float)
log = logging.getLogger("quire.gateway")

CHUNK_BYTES = 64 << 10
"""Reservation step for a body of unknown length."""
CLIENT_LEFT = 499
TRACED = "/v1/"
"""Prefix of traced routes."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing, and whose responses other origins cannot read."""


class AccessControl:
    def __init__(self, settings: Settings, group: GatewayGroup | None = None) -> None:
        """`group`: gateways that share open-request counts. Raises StartupError for an unusable key file."""
        self._keys = KeyRing(settings.api_key, settings.api_key_file)
        self._hosts = HostCheck(settings, keys_required=not self._keys.is_open)
        self._max_open = settings.max_open_per_key
        self._bodies = BodyBudget(max(settings.max_body_bytes_in_flight, 2 * settings.max_body_bytes))
        self._open = OpenCounts(group)

    def check_request_form(self, http: web.Request) -> None:
        """Run the checks that apply even to probes. Raises RequestError (400)."""
        hosts = http.headers.getall("Host", [])
        self._hosts.require_form(hosts, http.raw_path, needs_host=http.version >= (1, 1))

    @contextmanager
    def admit(self, http: web.Request) -> Iterator[None]:
        """Count the request as open; set TENANT and BODY_RESERVATION. Raises RequestError: 400, 401, 403, 429."""
        hosts, keys = http.headers.getall("Host", []), _keys_in(http)
        self._hosts.require_known(hosts)
        client = self._keys.client_of(keys)
        if http.method not in SAFE_METHODS and not (keys and keys[0].lower().startswith("bearer ")):
            # A browser sends a stored password with requests from any page.
            self._hosts.require_own_page(http.headers.getall("Origin", []), hosts)
        http[TENANT] = client.tenant
        if not self._keys.is_open and self._open.count(client.name) >= (client.max_open or self._max_open):
            message = "Too many requests are open with this key."
            raise RequestError(429, message, "rate_limit_error", code="too_many_open_requests", retry_after_s=1)
        self._open.add(client.name, 1)
        reservation = self._bodies.open_reservation(f"address {http.remote}" if self._keys.is_open else client.tenant)
        http[BODY_RESERVATION] = reservation
        try:
            yield
        finally:
            reservation.close()
            self._open.add(client.name, -1)


def make_middleware(
    access: AccessControl,
    metrics: GatewayMetrics,
    write_timeout_s: float,
    open_routes: Collection[str],
    tracing: Tracing = NO_TRACING,
) -> Callable[..., Any]:
    """Return the middleware: access control, OpenAI's error JSON and time-limited response writes.

    `open_routes`: patterns that need no key; all other routes, including unknown ones, do.
    """

    @web.middleware
    async def middleware(http: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(http)
        with ExitStack() as inside:
            span = http_span(
                tracing if route.startswith(TRACED) else NO_TRACING,
                method=http.method,
                route=route,
                scheme=http.scheme,
                traceparent=http.headers.get("traceparent"),
            )
            answered = inside.enter_context(span)
            try:
                access.check_request_form(http)
                if route not in open_routes:
                    inside.enter_context(access.admit(http))
                response = await handler(http)
            except RequestError as error:
                response = error_response(error, http)
                if error.status == 401 and route.startswith(PAGE):
                    response.headers["WWW-Authenticate"] = 'Basic realm="Quire: the API key is the password"'
            except web.HTTPException as error:
                response = _http_error(error, http)
            except ConnectionError:
                response = error_response(RequestError(CLIENT_LEFT, "The client left."))
            except asyncio.CancelledError:
                metrics.count_response(route, CLIENT_LEFT)
                answered(CLIENT_LEFT)
                raise
            except Exception as error:
                response = error_response(incident(error, route), http)
            response = _first_response(http, response)
            if not response.prepared:
                _add_request_id(http, response)
            metrics.count_response(route, response.status)
            answered(response.status)
            await _send(http, response, write_timeout_s)
        return response

    return middleware


def with_openai_errors(handler: BaseHandler, write_timeout_s: float) -> BaseHandler:
    """Wrap `handler` so that requests refused by aiohttp before any middleware also get OpenAI's error JSON."""

    async def answer(http: web.BaseRequest) -> web.StreamResponse:
        expectation = http.headers.get("Expect", "")
        if expectation and http.version >= HttpVersion11 and expectation.lower() != "100-continue":
            # aiohttp would repeat the header in its refusal, and fails if it is not UTF-8.
            return error_response(RequestError(417, "Expectation Failed."))
        try:
            return await handler(http)
        except web.HTTPException as error:
            return _http_error(error)

    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        response = await answer(http)
        if not response.prepared:
            await _send(http, response, write_timeout_s)
        return response

    return handle


async def record_begun_response(http: web.Request, response: web.StreamResponse) -> None:
    http[BEGUN_RESPONSE] = response


def _first_response(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Return the begun response, if any, instead of `response`, which would be written into its body.

    The begun one is cut off, so that clients do not take it for complete.
    """
    begun: web.StreamResponse = http.get(BEGUN_RESPONSE, response)
    if begun is not response:
        log.error("response aborted %s", fields(route=route_of(http), status=response.status))
        if http.transport is not None:
            http.transport.abort()
    return begun


def _add_request_id(http: web.Request, response: web.StreamResponse) -> None:
    request_id = http.get(ACCEPTED) or client_id(http)
    if request_id is None:
        return
    response.headers.setdefault(REQUEST_ID, request_id)
    if http.path.startswith(MESSAGES):
        response.headers[ANTHROPIC_REQUEST_ID] = response.headers[REQUEST_ID]


async def _send(http: web.BaseRequest, response: web.StreamResponse, timeout_s: float) -> None:
    """Write the response, or the rest of a stream. aiohttp would wait forever for a client that does not read."""
    try:
        async with asyncio.timeout(timeout_s):
            await response.prepare(http)
            await response.write_eof()
            await drain_writes(http)
    except TimeoutError:
        abort_connection(http.transport)
    except ConnectionError:
        log.debug("client left before its answer")


def client_id(http: web.Request) -> str | None:
    """Return the client's id for the request; None if it is unusable, because proxies add ids unasked."""
    name = http.headers.get(REQUEST_ID, "")
    return name if is_client_id(name) else None


def route_of(http: web.Request) -> str:
    resource = http.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


async def read_body(http: web.Request) -> bytes:
    """Return the whole JSON body. Raises RequestError: 400, 408, 413, 415, 429, 503."""
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError(415, "An encoded body is not accepted.", code="unsupported_content_encoding")
    if http.content_type != "application/json":
        raise RequestError(415, "The body must be of type application/json.", code="unsupported_media_type")
    if (http.content_length or 0) > http.client_max_size:
        raise _too_large()
    try:
        async with asyncio.timeout(http.app[READ_TIMEOUT_S]):
            return await _read_bounded(http)
    except TimeoutError:
        raise RequestError(408, "The body did not arrive in time.", code="request_timeout") from None
    except web.RequestPayloadError:
        raise RequestError(400, "The body is not well-formed HTTP.", code="invalid_body") from None


async def _read_bounded(http: web.Request) -> bytes:
    """Read the body, reserving memory as it arrives. Raises RequestError: 413, 429, 503."""
    reservation, body = http[BODY_RESERVATION], bytearray()
    await reservation.grow(http.content_length or 0)
    while part := await http.content.readany():
        body += part
        if len(body) > http.client_max_size:
            raise _too_large()
        if len(body) > reservation.num_bytes:
            await reservation.grow(max(len(body) - reservation.num_bytes, CHUNK_BYTES))
    return bytes(body)


def error_response(error: RequestError, http: web.Request | None = None) -> web.Response:
    """Return an error in the JSON of the called API: OpenAI's or Anthropic's."""
    headers = {}
    retry_after_s = RETRY_AFTER_S if error.status == 503 and error.retry_after_s is None else error.retry_after_s
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    data = error_json(error)
    if http is not None and http.path.startswith(MESSAGES):
        data = message_builder.error_json(error, http.get(ACCEPTED))
    response = json_response(data, error.status, headers)
    if error.status in (408, 413):
        response.force_close()
    return response


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(data), status=status, headers=headers, content_type="application/json")


def _keys_in(http: web.Request) -> list[str]:
    """Return the Authorization headers, or Anthropic's X-Api-Key as a Bearer header."""
    keys = http.headers.getall("Authorization", [])
    return keys or [f"Bearer {key}" for key in http.headers.getall("X-Api-Key", [])]


def _http_error(error: web.HTTPException, http: web.Request | None = None) -> web.Response:
    if error.status < 400 or error.status == 404:
        return error_response(RequestError(404, "There is no such route.", code="unknown_url"), http)
    response = error_response(RequestError(error.status, f"{HTTPStatus(error.status).phrase}."), http)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _too_large() -> RequestError:
    return RequestError(413, "The body is too large.", code="body_too_large")

"""Who may enter over HTTP and how refusals look: hosts, keys, bodies, and OpenAI's error JSON for every error."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from aiohttp import web

from service.errors import RequestError
from service.gateway.hall import incident
from service.gateway.openai_answers import encode_json, error_json
from service.metrics import GatewayMetrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({"/livez", "/readyz", "/health"})
"""Patterns of the routes that need no key; every other one does, unknown ones included."""

TENANT: web.RequestKey[str] = web.RequestKey("tenant", str)
ANONYMOUS = "anonymous"
log = logging.getLogger("quire.gateway")

LEFT = 499
BODY_TIMEOUT_S = 30.0
SEND_BUFFER_BYTES = 128 << 10
KEEP_ALIVE_TIMEOUT_S = 30.0
"""Also the time a client has for its headers: aiohttp closes a connection on which no request became complete."""

_HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class KeyRing:
    """The keys that may enter. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant(self, http: web.Request) -> str:
        """Whose request it is. Raises RequestError (401)."""
        if not self._digests:
            return ANONYMOUS
        headers = http.headers.getall("Authorization", [])
        scheme, _, key = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
        # Bytes, since comparing non-ASCII text raises; all keys, so that time tells nothing.
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        known = [hmac.compare_digest(digest, other) for other in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise RequestError(401, "A valid API key is required.", code="invalid_api_key")
        return "key-" + digest.hex()[:16]


def guard(keys: KeyRing, metrics: GatewayMetrics, write_timeout_s: float) -> Callable[..., Any]:
    """The one middleware: checks host and key, words every failure as OpenAI does, and sees the answer off."""

    @web.middleware
    async def middleware(http: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(http)
        try:
            _check_host(http)
            if route not in OPEN_ROUTES:
                http[TENANT] = keys.tenant(http)
            response = await handler(http)
        except RequestError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = _worded(error)
        except ConnectionError:
            response = error_response(RequestError(LEFT, "The client left."))  # nobody hears it
        except asyncio.CancelledError:
            metrics.responded(route, LEFT)
            raise
        except Exception as error:
            response = error_response(incident(error, route))
        metrics.responded(route, response.status)
        await _see_off(http, response, write_timeout_s)
        return response

    return middleware


def worded(handler: Handler) -> Handler:
    """`handler`, but what aiohttp refuses before any middleware runs (an Expect header) is worded like all else."""

    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            return await handler(http)
        except web.HTTPException as error:
            return _worded(error)

    return handle


async def _see_off(http: web.Request, response: web.StreamResponse, timeout_s: float) -> None:
    """Writes the response, what a stream has left of it included; aiohttp would wait for ever for who does not read."""
    try:
        async with asyncio.timeout(timeout_s):
            await response.prepare(http)
            await response.write_eof()
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
    except ConnectionError:
        log.debug("client left before its answer")


def route_of(http: web.Request) -> str:
    """The pattern of the matched route."""
    resource = http.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


async def read_body(http: web.Request) -> bytes:
    """The whole JSON body. Raises RequestError: 408, 413, 415."""
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError(415, "An encoded body is not accepted.", code="unsupported_content_encoding")
    if http.content_type != "application/json":
        raise RequestError(415, "The body must be of type application/json.", code="unsupported_media_type")
    if (http.content_length or 0) > http.client_max_size:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except TimeoutError:
        raise RequestError(408, "The body did not arrive in time.", code="request_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError:
        raise RequestError(400, "The body is not well-formed HTTP.", code="invalid_body") from None


def error_response(error: RequestError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = json_response(error_json(error), error.status, headers)
    if error.status in (408, 413):
        response.force_close()
    return response


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(data), status=status, headers=headers, content_type="application/json")


class Protocol(web.RequestHandler):
    """aiohttp's, but with bounded buffers, and what it refuses by itself (malformed HTTP) worded like all else."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # The kernel would keep megabytes for a client that does not read, and hide that it does not.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a response is under way, no other can be sent")
        if status == 400:
            error = RequestError(400, "The request is not well-formed HTTP.", code="bad_request")
        else:
            error = incident(exc or RuntimeError(f"aiohttp refuses with {status}"), "http")
        response = error_response(error)
        response.force_close()
        return response


def _check_host(http: web.Request) -> None:
    """Nothing here is decided on the host, but what stands behind a wrong one is not meant for us."""
    hosts = http.headers.getall("Host", [])
    if len(hosts) > 1 or not all(_HOST.fullmatch(host) for host in hosts) or (http.version >= (1, 1) and not hosts):
        raise RequestError(400, "The Host header is missing or malformed.", code="bad_host")
    foreign = not http.raw_path.startswith("/") and not any(http.raw_path.startswith(f"http://{h}/") for h in hosts)
    if foreign:
        raise RequestError(400, "The request is for another host.", code="bad_host")


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

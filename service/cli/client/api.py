"""HTTP client of a running service, for the terminal verbs: model, streams, metrics."""

from __future__ import annotations

import argparse
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from service.errors import StartupError

URL, KEY = "QUIRE_URL", "QUIRE_API_KEY"
CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 1 << 20


class ServiceError(Exception):
    """One-line error for the terminal."""


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get(URL) or "http://127.0.0.1:8000",
        help=f"the service (default: %(default)s; ${URL})",
    )
    parser.add_argument("--api-key", help=f"API key (default: the first of ${KEY}, which is safer than the flag)")


class EventLines:
    """SSE parser."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of complete events. Raises ValueError above MAX_EVENT_BYTES."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("an event without end")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class ServiceClient:
    """Client of one service, opened by `connected`. Raises StartupError for a malformed URL."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url.rstrip("/")

    async def model(self) -> str:
        """Return the name of the served model. Raises ServiceError."""
        async with self._response("GET", "/v1/models") as response:
            return str(json.loads(await response.read())["data"][0]["id"])

    async def metrics(self) -> str:
        """Return the metrics in Prometheus' text format. Raises ServiceError."""
        async with self._response("GET", "/metrics") as response:
            return await response.text()

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of one response; closing early cancels the request. Raises ServiceError."""
        events = EventLines()
        async with self._response("POST", path, json={**body, "stream": True}) as response:
            async for data in response.content.iter_any():
                for event in events.feed(data):
                    if event == b"[DONE]":
                        return
                    chunk = json.loads(event)
                    if "error" in chunk:
                        raise ServiceError(chunk["error"]["message"])
                    yield chunk
        raise ServiceError("the answer ended early")

    @asynccontextmanager
    async def _response(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._http.request(method, self._url + path, allow_redirects=False, **options) as response:
                if response.status != 200:
                    hint = f" (--api-key, or ${KEY})" if response.status == 401 else ""
                    raise ServiceError(await _refusal(response) + hint)
                yield response
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise StartupError(f"--url: {self._url!r} is not supported (an http or https URL)") from None
        except aiohttp.ClientConnectorError as error:
            raise ServiceError(f"{self._url} cannot be reached: {unreachable(error)} (set --url)") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceError(f"{self._url}: {error or type(error).__name__}") from None
        except ValueError:
            raise ServiceError(f"{self._url}{path}: not the answer of a Quire service") from None


@asynccontextmanager
async def connected(flags: argparse.Namespace) -> AsyncIterator[ServiceClient]:
    """Open a client. Sends nothing."""
    key = flags.api_key or os.environ.get(KEY, "").partition(",")[0].strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    # The loop blocks while the user types, and an idle connection may be closed meanwhile.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
        yield ServiceClient(http, flags.url)


def unreachable(error: aiohttp.ClientConnectorError) -> str:
    """Return the system's reason. Name-resolution errors have negative numbers, TLS errors their own."""
    cause = error.os_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{cause.verify_message} (SSL_CERT_FILE names the certificates to trust)"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS: {cause.reason}"
    number = cause.errno or 0
    return os.strerror(number) if number > 0 else cause.strerror or str(cause)


async def _refusal(response: aiohttp.ClientResponse) -> str:
    try:
        return str(json.loads(await response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status} from {response.url}"

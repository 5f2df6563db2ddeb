"""A running service as the terminal verbs see it: its model, its streams, its metrics."""

from __future__ import annotations

import argparse
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from service.cli.client.event_lines import EventLines
from service.errors import StartupError

URL, KEY = "QUIRE_URL", "QUIRE_API_KEY"
CONNECT_TIMEOUT_S = 10.0


class ServiceError(Exception):
    """What to tell the person at the terminal, as one line."""


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Where the service is and who asks."""
    parser.add_argument(
        "--url",
        default=os.environ.get(URL) or "http://127.0.0.1:8000",
        help=f"of the service (default: %(default)s; ${URL})",
    )
    parser.add_argument("--api-key", help=f"shown to the service; better given as ${KEY}, its first is used")


class Api:
    """Open inside `connected`. Raises StartupError where its URL is none."""

    def __init__(self, http: aiohttp.ClientSession, url: str):
        self._http = http
        self._url = url.rstrip("/")

    async def model(self) -> str:
        """The name of the model it serves. Raises ServiceError."""
        async with self._asked("GET", "/v1/models") as response:
            return json.loads(await response.read())["data"][0]["id"]

    async def metrics(self) -> str:
        """In Prometheus' text form. Raises ServiceError."""
        async with self._asked("GET", "/metrics") as response:
            return await response.text()

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of one answer. Leaving before the end cancels it. Raises ServiceError."""
        events = EventLines()
        async with self._asked("POST", path, json={**body, "stream": True}) as response:
            async for data in response.content.iter_any():
                for event in events.feed(data):
                    if event == b"[DONE]":
                        return
                    chunk = json.loads(event)
                    if "error" in chunk:
                        raise ServiceError(chunk["error"]["message"])
                    yield chunk
        raise ServiceError("the answer broke off")

    @asynccontextmanager
    async def _asked(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._http.request(method, self._url + path, allow_redirects=False, **options) as response:
                if response.status != 200:
                    raise ServiceError(await _refusal(response))
                yield response
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise StartupError(f"--url: {self._url!r} is no address of a service") from None
        except aiohttp.ClientConnectorError as error:
            raise ServiceError(f"{self._url} cannot be reached: {unreachable(error)}; --url says where it is") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceError(f"{self._url}: {error or type(error).__name__}") from None
        except ValueError:
            raise ServiceError(f"{self._url}{path} does not answer as Quire does") from None


@asynccontextmanager
async def connected(flags: argparse.Namespace) -> AsyncIterator[Api]:
    """The service that the flags name. Nothing is sent yet."""
    key = flags.api_key or os.environ.get(KEY, "").partition(",")[0].strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    # The chat's loop stands still while somebody types: a connection kept for the next line might be closed by then.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
        yield Api(http, flags.url)


def unreachable(error: aiohttp.ClientConnectorError) -> str:
    """Why, in the system's words: asyncio's say the address again. Names that are not found have numbers below 0, and
    what TLS refuses has numbers of its own."""
    cause = error.os_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{cause.verify_message} (SSL_CERT_FILE names the certificates to trust)"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS: {cause.reason}"
    return os.strerror(cause.errno) if (cause.errno or 0) > 0 else cause.strerror or str(cause)


async def _refusal(response: aiohttp.ClientResponse) -> str:
    try:
        return json.loads(await response.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status} from {response.url}"

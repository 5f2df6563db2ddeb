"""Strips a proxy's prefix from request paths before routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from yarl import URL

MakeRequest = Callable[..., web.BaseRequest]


def without_prefix(make_request: MakeRequest, prefix: str) -> MakeRequest:
    """Return a request factory that strips `prefix` from paths that have it."""
    if not prefix:
        return make_request

    def make(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        url = message.url
        if url.raw_path == prefix or url.raw_path.startswith(prefix + "/"):
            path = url.raw_path[len(prefix) :] or "/"
            url = URL.build(path=path, query_string=url.raw_query_string, encoded=True)
            message = message._replace(path=str(url), url=url)
        return make_request(message, *rest)

    return make

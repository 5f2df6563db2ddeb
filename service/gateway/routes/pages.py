"""Paged lists."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web

from service.gateway.core.refusals import refusal
from service.gateway.openai.json_objects import Json

MAX_PAGE = 10_000


def is_ascending(http: web.Request) -> bool:
    """Return whether the oldest item comes first. Raises RequestError (400)."""
    order = http.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refusal("order", "must be asc or desc")
    return order == "asc"


def page_limit(http: web.Request, default: int, most: int = MAX_PAGE) -> int:
    """Return the query's `limit`. Raises RequestError (400)."""
    text = http.query.get("limit", str(default))
    if not (re.fullmatch(r"[0-9]{1,9}", text) and 1 <= int(text) <= most):
        raise refusal("limit", f"must be between 1 and {most}")
    return int(text)


def page_json(http: web.Request, items: Sequence[Json], default_limit: int) -> Json:
    """Return OpenAI's list object: up to `limit` items after `after`. Raises RequestError (400)."""
    limit = page_limit(http, default_limit)
    after, start = http.query.get("after"), 0
    if after is not None:
        start = next((position for position, item in enumerate(items, 1) if item["id"] == after), len(items))
    page = items[start : start + limit]
    return list_json(page, has_more=start + len(page) < len(items))


def list_json(page: Sequence[Json], *, has_more: bool) -> Json:
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }

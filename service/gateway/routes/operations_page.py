"""The operations page: what the service does now, drawn in a browser, and a playground. It loads nothing foreign."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web

from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import PAGE, json_response
from service.queue.interface import QueueUnavailable
from service.queue.messages import WorkerCard

ASSETS = {
    "ui.css": "text/css",
    "ui.js": "text/javascript",
    "drawing.js": "text/javascript",
    "playground.js": "text/javascript",
}
HEADERS = {
    # The page draws with inline colours; it loads nothing but its own files and speaks to nobody but us.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def operations_routes(service: InferenceService) -> list[web.RouteDef]:
    """The page, its files, and the state that it asks for once a second."""

    async def state(http: web.Request) -> web.Response:
        return json_response(await _state(service), headers={"Cache-Control": "no-store"})

    return [
        web.get(PAGE, _file("index.html", "text/html")),
        *(web.get(f"{PAGE}/{name}", _file(name, kind)) for name, kind in ASSETS.items()),
        web.get(f"{PAGE}/state", state),
    ]


def _file(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    text = (files("service.gateway") / "ui" / name).read_text()

    async def handle(http: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=HEADERS)

    return handle


async def _state(service: InferenceService) -> dict[str, object]:
    """Latencies are cumulative counts by bucket; `num_queued` is null while the queue cannot be asked."""
    latency = service.metrics.latency_buckets()
    try:
        await service.fleet.look()
        view = await service.fleet.view()
        cards, num_queued = view.cards, view.queue.num_waiting
    except QueueUnavailable:
        cards, num_queued = (), None
    return {
        "at_s": asyncio.get_running_loop().time(),
        "model": service.model.name,
        "num_open": service.dispatcher.num_open,
        "num_queued": num_queued,
        "latency_bounds_s": {
            name: [bound if math.isfinite(bound) else None for bound, _ in buckets] for name, buckets in latency.items()
        },
        "latency": {name: [count for _, count in buckets] for name, buckets in latency.items()},
        "workers": [_worker(card) for card in cards],
    }


def _worker(card: WorkerCard) -> dict[str, object]:
    """`blocks` is null until the worker has heard that somebody looks, `host_blocks` also without a second tier."""
    num_cells = len(card.blocks)
    return {
        "id": card.worker_id,
        "ready": card.ready,
        "num_blocks": card.num_blocks,
        "block_size": card.block_size,
        "blocks": base64.b64encode(card.blocks).decode() if card.blocks else None,
        "host_blocks": base64.b64encode(card.host_blocks).decode() if card.host_blocks else None,
        "blocks_per_cell": -(-card.num_blocks // num_cells) if num_cells else 1,
        "stats": card.stats,
    }

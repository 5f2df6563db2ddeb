"""Metrics, probes, and the operations page `/ui`: live charts and a playground, without foreign assets."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web

from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import json_response
from service.gateway.routes.probes import readiness
from service.observability.metrics import CONTENT_TYPE, LaneStats
from service.observability.worker_metrics import WorkerFormats
from service.queue.interface import QUEUE_LANES, QueueUnavailable
from service.queue.messages import WorkerCard

GATEWAY = __name__.partition(".routes.")[0]
ASSETS = {
    "ui.css": "text/css",
    "ui.js": "text/javascript",
    "drawing.js": "text/javascript",
    "playground.js": "text/javascript",
}
HEADERS = {
    # The page uses inline colours, loads only its own files and calls only this server.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Operations:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def page_state(self, http: web.Request) -> web.Response:
        """Answer with what the page shows, which it polls once a second."""
        return json_response(await _state(self._service), headers={"Cache-Control": "no-store"})

    async def metrics(self, http: web.Request) -> web.Response:
        metrics = self._service.metrics
        try:
            view = await self._service.fleet.view()
            lanes = {
                name: LaneStats(lane.num_jobs, view.oldest_wait_s(name)) for name, lane in view.queue.lanes.items()
            }
            stats = {card.worker_id: card.stats for card in view.cards}
            formats = {card.worker_id: _formats(card) for card in view.cards if card.kv_cache_dtype}
            metrics.set_fleet(stats, lanes, view.queue.num_leases, formats)
        except QueueUnavailable:
            metrics.set_fleet({}, dict.fromkeys(QUEUE_LANES, LaneStats(math.nan, math.nan)), math.nan)
        is_alone = self._service.group is None  # else files are read
        body = metrics.exposition() if is_alone else await asyncio.to_thread(metrics.exposition)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def livez(self, http: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def readyz(self, http: web.Request) -> web.Response:
        status, body = await readiness(self._service)
        return json_response(body, status)


def asset(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler of one of the page's files."""
    text = (files(GATEWAY) / "ui" / name).read_text()

    async def handle(http: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=HEADERS)

    return handle


async def _state(service: InferenceService) -> dict[str, object]:
    """Latencies are cumulative counts by bucket; `num_queued` is null while the queue is away."""
    latency = service.metrics.latency_buckets()
    try:
        await service.fleet.request_block_maps()
        view = await service.fleet.view()
        cards, num_queued = view.cards, view.queue.num_waiting
    except QueueUnavailable:
        cards, num_queued = (), None
    return {
        "at_s": asyncio.get_running_loop().time(),
        "model": service.model.name,
        "num_open": service.dispatcher.num_open
        if service.group is None
        else await asyncio.to_thread(service.metrics.num_open),
        "num_queued": num_queued,
        "latency_bounds_s": {
            name: [bound if math.isfinite(bound) else None for bound, _ in buckets] for name, buckets in latency.items()
        },
        "latency": {name: [count for _, count in buckets] for name, buckets in latency.items()},
        "workers": [_worker(card) for card in cards],
    }


def _worker(card: WorkerCard) -> dict[str, object]:
    """`blocks` is null until the worker knows that a page looks, `host_blocks` also without a host cache."""
    num_cells = len(card.blocks)
    return {
        "id": card.worker_id,
        "ready": card.ready,
        "num_blocks": card.num_blocks,
        "block_size": card.block_size,
        "block_bytes": card.block_bytes,
        "kv_cache_dtype": card.kv_cache_dtype,
        "weight_format": card.weight_format,
        "weight_bytes": card.weight_bytes,
        "blocks": base64.b64encode(card.blocks).decode() if card.blocks else None,
        "host_blocks": base64.b64encode(card.host_blocks).decode() if card.host_blocks else None,
        "blocks_per_cell": -(-card.num_blocks // num_cells) if num_cells else 1,
        "stats": card.stats,
    }


def _formats(card: WorkerCard) -> WorkerFormats:
    return WorkerFormats(
        card.weight_format, card.weight_bytes, card.kv_cache_dtype, card.block_size, card.block_bytes, card.num_blocks
    )

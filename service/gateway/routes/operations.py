"""Metrics, probes, and the pages below `/ui`, which load no third-party assets."""

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
from service.observability.worker_metrics import AdapterLabels, WorkerFormats
from service.queue.codec import unpack_ids
from service.queue.interface import QUEUE_LANES, QueueUnavailable
from service.queue.messages import BlockTable, WorkerCard

GATEWAY = __name__.partition(".routes.")[0]
ASSETS = {
    "ui.css": "text/css",
    "vendor/uPlot.min.css": "text/css",
    **dict.fromkeys(
        (
            "theme.js", "page.js", "vendor/uPlot.iife.min.js", "charts.js",
            "ui.js", "series.js", "drawing.js", "sequences.js",
            "playground.js", "conversations.js", "simulator.js", "allocators.js",
        ),
        "text/javascript",
    ),
}  # fmt: skip
PAGES = {"": "index.html", "/playground": "playground.html", "/simulator": "simulator.html"}
"""Page files by path below `/ui`."""
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
        """Return the state shown on the page, which polls it once a second."""
        return json_response(await _state(self._service), headers={"Cache-Control": "no-store"})

    async def page_sequences(self, http: web.Request) -> web.Response:
        """Return token counts of the fleet's longest sequences, and the block table of the queried sequence."""
        chosen = (http.query.get("request"), http.query.get("branch", "0"))
        try:
            await self._service.fleet.request_block_maps()
            cards = (await self._service.fleet.view()).cards
        except QueueUnavailable:
            cards = ()
        sequences = [_sequence(card.worker_id, table) for card in cards for table in card.tables]
        found = [table for card in cards for table in card.tables if (table.request_id, str(table.branch)) == chosen]
        body = {"sequences": sequences, "table": _table(found[0]) if found else None}
        return json_response(body, headers={"Cache-Control": "no-store"})

    async def metrics(self, http: web.Request) -> web.Response:
        metrics = self._service.metrics
        try:
            view = await self._service.fleet.view()
            lanes = {
                name: LaneStats(lane.num_jobs, view.oldest_wait_s(name)) for name, lane in view.queue.lanes.items()
            }
            stats = {card.worker_id: card.stats for card in view.cards}
            formats = {card.worker_id: _formats(card) for card in view.cards if card.kv_cache_dtype}
            adapters = {
                card.worker_id: AdapterLabels(str(card.max_loras), card.running_adapters, card.waiting_adapters)
                for card in view.cards
                if card.max_loras
            }
            metrics.set_fleet(stats, lanes, view.queue.num_leases, formats, adapters)
        except QueueUnavailable:
            metrics.set_fleet({}, dict.fromkeys(QUEUE_LANES, LaneStats(math.nan, math.nan)), math.nan)
        is_alone = self._service.group is None  # else it reads files
        body = metrics.exposition() if is_alone else await asyncio.to_thread(metrics.exposition)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def livez(self, http: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def readyz(self, http: web.Request) -> web.Response:
        status, body = await readiness(self._service)
        return json_response(body, status)


def asset(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler for one of the page's files."""
    text = (files(GATEWAY) / "ui" / name).read_text(encoding="utf-8")

    async def handle(http: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=HEADERS)

    return handle


async def without_slash(http: web.Request) -> web.Response:
    """Redirect /ui/ to /ui, from where the page's relative links work. Relative, because --root-path may precede it."""
    return web.Response(status=308, headers={"Location": "../ui"})


async def _state(service: InferenceService) -> dict[str, object]:
    """Return the page's state. Latencies are cumulative bucket counts; `num_queued` is null if the queue is
    unavailable."""
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
    """Describe a worker. `blocks` is null until a page is viewed, `host_blocks` also without a host cache."""
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


def _sequence(worker_id: str, table: BlockTable) -> dict[str, object]:
    """Return only counts and the request's id, because any tenant may see them."""
    holders = unpack_ids(table.holders)
    return {
        "worker": worker_id,
        "request": table.request_id,
        "branch": table.branch,
        "num_prompt_tokens": table.num_prompt_tokens,
        "num_tokens": table.num_tokens,
        "num_computed_tokens": table.num_computed_tokens,
        "num_blocks": table.num_blocks,
        "num_shared": sum(count > 1 for count in holders),
        "num_copied": len(table.copies) // 8,
        "num_swapped": len(table.host_blocks) // 4,
        "num_drafted": table.num_drafted,
        "num_accepted": table.num_accepted,
    }


def _table(table: BlockTable) -> dict[str, object]:
    copies = unpack_ids(table.copies)
    return {
        "request": table.request_id,
        "branch": table.branch,
        "blocks": unpack_ids(table.blocks),
        "holders": unpack_ids(table.holders),
        "states": [*table.states],
        "copied_from": dict(zip(map(str, copies[::2]), copies[1::2], strict=True)),
        "host_blocks": unpack_ids(table.host_blocks),
    }


def _formats(card: WorkerCard) -> WorkerFormats:
    return WorkerFormats(
        card.weight_format, card.weight_bytes, card.kv_cache_dtype, card.block_size, card.block_bytes, card.num_blocks
    )

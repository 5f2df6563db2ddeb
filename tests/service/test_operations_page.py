"""The pages below /ui in a real browser."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from html import unescape
from importlib.resources import files

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from service.engine.kv.block_pool import FIRST_OWNER, SHARED
from service.queue.codec import pack_ids
from service.queue.messages import BlockTable
from tests.support.gateway import open_gateway, write_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def opened(url: str, profile: str, *flags: str) -> str:
    """The page after five seconds of its own time."""
    command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", "--virtual-time-budget=5000", *flags, "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("width", [360, 1200])
async def test_a_browser_draws_the_fleet(tmp_path, width):
    async with open_gateway(write_model(tmp_path / "model")) as gateway:
        gateway.worker.stats = {"num_running": 3.0, "num_blocks_used": 16.0, "num_blocks_free": 48.0}
        gateway.worker.stats |= {"num_host_blocks_used": 5.0, "num_host_blocks_free": 3.0}
        gateway.worker.blocks = bytes([SHARED] * 16 + [0] * 48)
        gateway.worker.host_blocks = bytes([FIRST_OWNER] * 5 + [0] * 3)
        await gateway.worker.announce()
        page = await asyncio.to_thread(
            opened, gateway.url + "/ui", str(tmp_path / "profile"), f"--window-size={width},900"
        )
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    assert re.search(r"Running\s+3\b", text)
    assert re.search(r"Blocks in use\s+25\.0 %", text)
    assert "64 blocks of 16 tokens." in text
    canvas = re.search(r'<canvas role="img" aria-label="Blocks: 16 active, 48 free"[^>]*height: (\d+)px', page)
    assert canvas is not None, "the pool was not drawn"
    assert int(canvas[1]) > 0
    label = "Blocks on the host: 5 swapped out, 0 cached, 3 free"
    assert re.search(rf'<canvas role="img" aria-label="{label}"[^>]*height: [1-9]', page), "the host was not drawn"


async def test_a_gateway_that_is_gone_is_shown_as_gone(tmp_path):
    """Not in the browser's own words for it, of which each has others."""

    async def cut(http: web.Request) -> web.Response:
        http.transport.abort()
        return web.Response()

    async def received(http: web.Request) -> web.Response:
        return web.FileResponse(files("service.gateway") / "ui" / http.match_info.get("name", "index.html"))

    app = web.Application()
    app.router.add_get("/ui/state", cut)
    app.router.add_get("/ui", received)
    app.router.add_get("/ui/{name:.+}", received)
    async with TestServer(app) as server:
        page = await asyncio.to_thread(opened, str(server.make_url("/ui")), str(tmp_path / "profile"))
    assert '<p id="status" role="status" class="bad">The gateway does not answer.</p>' in page


async def test_what_a_fleet_does_not_have_takes_no_room(tmp_path):
    """A canvas that is only marked as hidden would be a page's worth of nothing: the page's own style decides."""
    async with open_gateway(write_model(tmp_path / "model")) as gateway:
        gateway.worker.stats = {"num_running": 0.0, "num_blocks_used": 0.0, "num_blocks_free": 64.0}
        gateway.worker.blocks = bytes(64)
        await gateway.worker.announce()
        page = await asyncio.to_thread(opened, gateway.url + "/ui", str(tmp_path / "profile"), "--window-size=1200,900")
        async with gateway.http.get(gateway.url + "/ui/ui.css") as response:
            style = await response.text()
    on_gpu, on_host = re.findall(r'<canvas role="img"[^>]*>', page)
    assert "hidden" not in on_gpu
    assert "hidden" in on_host
    assert re.search(r"\[hidden\] \{ display: none !important; \}", style)


async def test_the_sequences_are_listed(tmp_path):
    async with open_gateway(write_model(tmp_path / "model")) as gateway:
        gateway.worker.tables = (
            BlockTable(
                request_id="R1/1",
                branch=2,
                num_prompt_tokens=20,
                num_tokens=41,
                num_computed_tokens=40,
                num_blocks=3,
                blocks=pack_ids([7, 2, 9]),
                holders=pack_ids([2, 1, 1]),
                states=bytes(3),
                num_drafted=4,
                num_accepted=3,
            ),
        )
        await gateway.worker.announce()
        page = await asyncio.to_thread(
            opened, gateway.url + "/ui", str(tmp_path / "profile"), "--window-size=1200,4000"
        )
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    assert re.search(r"R1/1 · 2\s+decoding\s+41\s+3\s+1\s+0\s+3 / 4", text)


@pytest.mark.parametrize("width", [360, 1200])
async def test_the_simulator_runs(tmp_path, width):
    async with open_gateway(write_model(tmp_path / "model")) as gateway:
        page = await asyncio.to_thread(
            opened, gateway.url + "/ui/simulator", str(tmp_path / "profile"), f"--window-size={width},900"
        )
    assert int(re.search(r'<span id="now">(\d+)</span>', page)[1]) > 0
    labels = re.findall(r'<canvas role="img"[^>]* aria-label="([^"]*)"', page)
    assert [label.partition(":")[0] for label in labels] == ["Naive", "Power of two", "Paged"]


async def test_the_playground_finds_the_model(tmp_path):
    async with open_gateway(write_model(tmp_path / "model")) as gateway:
        page = await asyncio.to_thread(opened, gateway.url + "/ui/playground", str(tmp_path / "profile"))
    assert '<p id="model" class="model" title="scripted">scripted</p>' in page
    assert "1 worker ready" in page

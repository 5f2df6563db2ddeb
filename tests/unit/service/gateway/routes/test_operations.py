"""The operations page over HTTP: who may see it, what it says."""

from __future__ import annotations

import base64
import re
from importlib.resources import files

import pytest

from service.gateway.routes.operations import ASSETS
from service.observability.worker_metrics import WORKER_METRICS
from tests.support.gateway import open_gateway, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


async def test_the_state_has_workers_latencies_and_blocks(folder):
    async with open_gateway(folder) as gateway:
        gateway.worker.stats = {"num_running": 2.0, "num_blocks_used": 3.0}
        await gateway.worker.announce()
        await gateway.post("/v1/completions", {"model": "scripted", "prompt": "the", "max_tokens": 3})
        status, state = await gateway.get("/ui/state")
    assert status == 200
    (worker,) = state["workers"]
    assert (worker["id"], worker["ready"], worker["num_blocks"], worker["blocks"]) == ("scripted", True, 64, None)
    assert worker["host_blocks"] is None
    assert worker["stats"] == {"num_running": 2.0, "num_blocks_used": 3.0}
    for name in ("ttft", "gap"):
        bounds, counts = state["latency_bounds_s"][name], state["latency"][name]
        assert bounds[-1] is None
        assert bounds[:-1] == sorted(bounds[:-1])
        assert counts == sorted(counts)
    assert state["latency"]["ttft"][-1] == 1
    assert state["num_queued"] == 0


async def test_looking_asks_the_workers_to_show_their_blocks(folder):
    async with open_gateway(folder) as gateway:
        assert not await gateway.worker.announce()
        await gateway.get("/ui/state")
        assert await gateway.worker.announce()


async def test_the_page_needs_nothing_from_elsewhere(folder):
    async with open_gateway(folder) as gateway:
        async with gateway.http.get(gateway.url + "/ui") as response:
            page = await response.text()
            assert response.status == 200
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        for name, kind in ASSETS.items():
            async with gateway.http.get(f"{gateway.url}/ui/{name}") as response:
                assert (response.status, response.content_type) == (200, kind)
                page += await response.text()
    assert re.findall(r"https?://", page) == []
    assert {item.name for item in (files("service.gateway") / "ui").iterdir()} == {"index.html", *ASSETS}


def test_the_page_asks_for_stats_that_workers_report():
    script = (files("service.gateway") / "ui" / "ui.js").read_text()
    asked = set(re.findall(r'(?:sum\(\w+, "|rate\("|stats\.)(\w+)', script))
    reported = {metric.stat for metric in WORKER_METRICS}
    assert len(asked) > 8
    assert asked - reported == set()


async def test_a_browser_may_show_the_key_as_a_password(folder):
    async with open_gateway(folder, api_key=("right",)) as gateway:
        async with gateway.http.get(gateway.url + "/ui") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"].startswith("Basic ")
        for password, status in (("right", 200), ("wrong", 401), ("", 401)):
            headers = {"Authorization": "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()}
            for path in ("/ui", "/ui/state", "/ui/ui.js", "/v1/models"):
                async with gateway.http.get(gateway.url + path, headers=headers) as response:
                    assert response.status == status
        for broken in ("Basic", "Basic !", "Basic " + base64.b64encode(b"right").decode(), "Basic cmlnaHQ6"):
            async with gateway.http.get(gateway.url + "/ui", headers={"Authorization": broken}) as response:
                assert response.status == 401

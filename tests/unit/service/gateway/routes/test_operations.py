"""The operations page over HTTP: who may see it, what it says."""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from importlib.resources import files
from pathlib import Path

import pytest

from service.gateway.routes.operations import ASSETS, PAGES
from service.observability.worker_metrics import WORKER_METRICS
from service.queue.codec import pack_ids
from service.queue.messages import BlockTable
from tests.support.gateway import open_gateway, write_model

UI = Path(str(files("service.gateway"))) / "ui"
POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


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
        text = ""
        for path in PAGES:
            async with gateway.http.get(f"{gateway.url}/ui{path}") as response:
                assert (response.status, response.content_type) == (200, "text/html")
                assert response.headers["Content-Security-Policy"] == POLICY
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                text += await response.text()
        for name, kind in ASSETS.items():
            async with gateway.http.get(f"{gateway.url}/ui/{name}") as response:
                assert (response.status, response.content_type) == (200, kind)
                text += await response.text()
    assert set(re.findall(r"https?://[^\s)]*", text)) == {"https://github.com/leeoniya/uPlot"}  # its comment
    served = {path for path in UI.rglob("*") if path.is_file() and path.suffix not in (".md", ".txt")}
    assert {path.relative_to(UI).as_posix() for path in served} == {*PAGES.values(), *ASSETS}


@pytest.mark.parametrize("page", PAGES.values())
def test_a_page_refers_to_files_that_are_served(page):
    folder = "" if page == "index.html" else "ui/"
    referred = re.findall(r'(?:src|href)="([^"#]+)"', (UI / page).read_text())
    paths = {posixpath.normpath(folder + name) for name in referred if not name.startswith("data:")}
    assert paths <= {f"ui{path}" for path in PAGES} | {f"ui/{name}" for name in ASSETS}
    assert {"ui", "ui/playground", "ui/simulator", "ui/ui.css", "ui/theme.js"} <= paths


def test_pages_of_an_address_with_a_password_may_fetch():
    """A relative path would keep the password, which fetch refuses."""
    script = "".join(path.read_text() for path in UI.glob("*.js"))
    assert set(re.findall(r"fetch\((\w*)", script)) == {"own"}


def test_each_control_has_its_label():
    text = "".join((UI / page).read_text() for page in PAGES.values())
    for label in re.findall(r"<label.*?</label>", text):
        if "<output" in label:  # labelable, and first: without `for` it takes the label
            assert re.search(r'^<label for="(\w+)">.*<input id="\1"', label)
    assert text.count("<output") == 4


async def test_a_slash_after_the_path_is_dropped(folder):
    async with (
        open_gateway(folder) as gateway,
        gateway.http.get(gateway.url + "/ui/", allow_redirects=False) as response,
    ):
        assert (response.status, response.headers["Location"]) == (308, "../ui")


def test_vendored_files_match_their_release():
    table = (UI / "vendor" / "README.md").read_text()
    listed = dict(re.findall(r"^\| `([\w.]+)` .* `([0-9a-f]{64})` \|$", table, re.MULTILINE))
    assert {f"vendor/{name}" for name in listed} == {name for name in ASSETS if name.startswith("vendor/")}
    for name, digest in listed.items():
        assert hashlib.sha256((UI / "vendor" / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (UI / "vendor" / "uPlot.LICENSE.txt").read_text()


TABLES = (
    BlockTable(
        request_id="R1/1",
        branch=1,
        num_prompt_tokens=20,
        num_tokens=41,
        num_computed_tokens=40,
        num_blocks=3,
        blocks=pack_ids([7, 2, 9]),
        holders=pack_ids([2, 1, 1]),
        states=bytes([1, 0, 0]),
        copies=pack_ids([1, 5]),
        num_drafted=4,
        num_accepted=3,
    ),
    BlockTable(
        request_id="R2/1",
        branch=0,
        num_prompt_tokens=20,
        num_tokens=33,
        num_computed_tokens=0,
        num_blocks=0,
        host_blocks=pack_ids([4, 5]),
    ),
)


async def test_sequences_are_counts_and_one_table(folder):
    async with open_gateway(folder) as gateway:
        gateway.worker.tables = TABLES
        await gateway.worker.announce()
        status, all_of_them = await gateway.get("/ui/sequences")
        _, chosen = await gateway.get("/ui/sequences?request=R1/1&branch=1")
        _, ended = await gateway.get("/ui/sequences?request=R1/1&branch=0")
        assert await gateway.worker.announce()  # looking asks for tables
    assert status == 200
    assert all_of_them["table"] is None
    assert ended == all_of_them
    first, second = chosen["sequences"]
    counts = {name: first[name] for name in ("num_blocks", "num_shared", "num_copied", "num_swapped", "num_drafted")}
    assert counts == {"num_blocks": 3, "num_shared": 1, "num_copied": 1, "num_swapped": 0, "num_drafted": 4}
    assert (second["request"], second["num_swapped"]) == ("R2/1", 2)
    assert chosen["table"] == {
        "request": "R1/1",
        "branch": 1,
        "blocks": [7, 2, 9],
        "holders": [2, 1, 1],
        "states": [1, 0, 0],
        "copied_from": {"1": 5},
        "host_blocks": [],
    }


async def test_sequences_have_no_tokens_and_need_the_key(folder):
    assert not any("token_ids" in name or name == "prompt" for name in BlockTable.__annotations__)
    async with open_gateway(folder, api_key=("right",)) as gateway:
        assert (await gateway.get("/ui/sequences"))[0] == 401


def test_the_page_asks_for_stats_that_workers_report():
    script = "".join(path.read_text() for path in UI.glob("*.js"))
    asked = set(re.findall(r'(?:sum\(\w+, "|rate\("|growth\("|stats\.)(\w+)', script))
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
            for path in ("/ui", "/ui/state", "/ui/ui.js", "/ui/simulator", "/v1/models"):
                async with gateway.http.get(gateway.url + path, headers=headers) as response:
                    assert response.status == status
        for broken in ("Basic", "Basic !", "Basic " + base64.b64encode(b"right").decode(), "Basic cmlnaHQ6"):
            async with gateway.http.get(gateway.url + "/ui", headers={"Authorization": broken}) as response:
                assert response.status == 401

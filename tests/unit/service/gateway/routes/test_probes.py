"""The probe port: it answers while the event loop is busy, distinguishes busy from dead, and cannot be blocked."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from service.config.settings import Settings
from service.errors import StartupError
from service.gateway.core import fleet
from service.gateway.core.served_model import ServedModel
from service.gateway.core.service import InferenceService
from service.gateway.endpoints import read_outline
from service.gateway.routes import probes
from service.gateway.routes.probes import probed
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.fakes.queue.worker import MemoryWorkerQueue
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.gateway import MODEL

HOST = "127.0.0.1"


@asynccontextmanager
async def open_probes(model_folder, *, with_worker=True):
    """(port, worker) of an inference service whose loop reports."""
    settings = Settings(model=model_folder, served_model_name=MODEL)
    queue = MemoryGatewayQueue()
    service = InferenceService(settings, ServedModel.read(settings), queue, read_outline)
    worker = ScriptedWorker(MemoryWorkerQueue(queue.data), MODEL, lambda job: None)
    if with_worker:
        await worker.announce()
    try:
        async with probed(service, HOST, 0) as port:
            yield port, worker
    finally:
        await service.close()


def ask(port, path="/livez", method="GET"):
    """Status and JSON, on the caller's thread."""
    with socket.create_connection((HOST, port), timeout=5) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = b""
        while data := sock.recv(4096):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else None


async def until(port, path, status, worker=None):
    """Ask until `status` comes; `worker` renews its card meanwhile, as a slow machine may see each too late."""
    async with asyncio.timeout(30):
        while (await asyncio.to_thread(ask, port, path))[0] != status:
            if worker is not None:
                await worker.announce()
            await asyncio.sleep(0.02)


async def test_it_answers_while_the_loop_is_blocked(model_folder, monkeypatch):
    monkeypatch.setattr(probes, "TICK_S", 0.2)
    monkeypatch.setattr(probes, "STALE_AFTER_S", 1.5)
    async with open_probes(model_folder) as (port, worker):
        await until(port, "/readyz", 200, worker)
        asked_s, answers = [], []

        def look():
            blocked_s = time.monotonic()
            while time.monotonic() - blocked_s < probes.STALE_AFTER_S + 0.8:
                started_s = time.monotonic()
                answers.append((ask(port, "/livez"), ask(port, "/readyz")))
                asked_s.append(time.monotonic() - started_s)
                time.sleep(0.05)

        with ThreadPoolExecutor(1) as beside:
            beside.submit(look).result()  # what no coroutine may do: nothing else on this loop runs meanwhile
        assert {live[0] for live, _ in answers} == {200}
        assert answers[-1][0][1]["loop_silent_s"] > probes.STALE_AFTER_S
        assert answers[0][1][0] == 200
        assert answers[-1][1] == (
            503,
            {"status": "not ready", "missing": ["this gateway is busy"], "num_ready_workers": 0},
        )
        assert max(asked_s) < probes.STALE_AFTER_S  # the loop was blocked for longer
        await until(port, "/readyz", 200, worker)


async def test_a_loop_that_never_turns_again_is_dead(model_folder, monkeypatch):
    monkeypatch.setattr(probes, "DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(probes, "TICK_S", 3600.0)
    async with open_probes(model_folder) as (port, _):
        await until(port, "/livez", 503)
        assert (await asyncio.to_thread(ask, port))[1]["status"] == "dead"


async def test_ready_only_with_a_ready_worker_of_recent_heartbeat(model_folder, monkeypatch):
    monkeypatch.setattr(probes, "TICK_S", 0.1)
    monkeypatch.setattr(fleet, "CARD_LATE_S", 1.0)
    async with open_probes(model_folder, with_worker=False) as (port, worker):
        async with asyncio.timeout(30):  # the first answers may be that it has just started
            while "no ready worker" not in (await asyncio.to_thread(ask, port, "/readyz"))[1].get("missing", [""])[0]:
                await asyncio.sleep(0.02)
        worker.ready = False
        await worker.announce()
        await asyncio.sleep(2 * probes.TICK_S)
        assert (await asyncio.to_thread(ask, port, "/readyz"))[0] == 503
        worker.ready = True
        await until(port, "/readyz", 200, worker)
        await until(port, "/readyz", 503)  # its card is not renewed


async def test_what_it_does_not_know(model_folder):
    async with open_probes(model_folder) as (port, _):
        for path, method in (("/metrics", "GET"), ("/livez", "POST"), ("/", "GET"), ("/livez/x", "GET")):
            assert (await asyncio.to_thread(ask, port, path, method))[0] == 404
        assert await asyncio.to_thread(ask, port, "/livez?x=1") != (404, None)
        assert await asyncio.to_thread(ask, port, "/livez", "HEAD") == (200, None)


async def test_none_holds_it_up(model_folder):
    async with open_probes(model_folder) as (port, _):
        slow = [socket.create_connection((HOST, port)) for _ in range(2 * probes.MAX_CLIENTS)]
        for sock in slow:
            sock.sendall(b"GET /livez HTTP/1.1\r\n")
        started_s = time.monotonic()
        assert (await asyncio.to_thread(ask, port))[0] == 200
        assert time.monotonic() - started_s < probes.CLIENT_TIMEOUT_S
        for garbage in (b"\x00" * 10_000, b"\r\n\r\n", b"GET\r\n\r\n", b"GET  \r\n\r\n"):
            with socket.create_connection((HOST, port)) as sock:
                sock.sendall(garbage)
        assert (await asyncio.to_thread(ask, port))[0] == 200
        for sock in slow:
            sock.close()


async def test_a_port_that_is_taken(model_folder):
    with socket.create_server((HOST, 0)) as taken:
        settings = Settings(model=model_folder)
        service = InferenceService(settings, ServedModel.read(settings), MemoryGatewayQueue(), read_outline)
        with pytest.raises(StartupError, match="--probe-port"):
            async with probed(service, HOST, taken.getsockname()[1]):
                pass
        await service.close()

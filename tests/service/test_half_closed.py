"""Clients that half-close their connection after their request, at a real gateway on its own event loop."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.support.served import Served

SOON_S = 10.0
CANCELLED = 'quire:requests_ended_total{reason="cancelled"}'


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    running = Served(tmp_path_factory.mktemp("served") / "data", "--device", "cpu")
    yield running
    running.terminate()


def ask(served: Served, **fields) -> socket.socket:
    """A connection on which a request was made, and nothing more will be."""
    parts = urlsplit(served.url)
    client = socket.create_connection((parts.hostname, parts.port), timeout=SOON_S)
    body = json.dumps({"model": "demo", "prompt": "Once upon a time", "temperature": 0, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    client.shutdown(socket.SHUT_WR)
    return client


def count(served: Served, name: str) -> float:
    """One number of /metrics, by its name and labels."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=SOON_S) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


def until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_they_get_their_answer_and_the_end_of_the_connection(served, stream):
    with ask(served, max_tokens=60, stream=stream) as client:
        received = b""
        while data := client.recv(1 << 16):
            received += data
    head, _, body = received.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    assert head.startswith(b"200 ")
    if stream:
        assert b"data: [DONE]" in body
    else:
        assert json.loads(body)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_they_are_missed_when_they_leave(served, stream):
    before = count(served, CANCELLED)
    with ask(served, max_tokens=1900, ignore_eos=True, stream=stream):
        until(lambda: count(served, "quire:open_requests") == 1)
        assert count(served, CANCELLED) == before
    until(lambda: count(served, CANCELLED) == before + 1)

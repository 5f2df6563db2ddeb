"""Two workers and two gateways of one `quire serve`: how they share, and what the death of one does to the others."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from tests.support.served import REPOSITORY, Served, alive

NUM_STREAMS = 64
PROMPTS = [f"Once upon a time there were {number} foxes" for number in range(4)]
BODY = {"model": "demo", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    running = Served(tmp_path_factory.mktemp("data"), "--data-parallel-size=2", "-asc=2")
    yield running
    running.terminate()


def pid_of(served, name):
    """The process id of the newest child of that name, such as "worker-1"."""
    for pid in sorted(served.descendants(), reverse=True):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"QUIRE_PROCESS_NAME={name}".encode() in environ:
            return pid
    raise AssertionError(f"no {name}:\n{served.output}")


def metric(served, name):
    """The sum of a metric's samples, over a new connection."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", text))


async def stream_all(served, kills):
    """Return each stream's text, None if its gateway died. `kills`: process ids by the number of streams begun."""
    num_begun = 0

    async def read(client, number):
        nonlocal num_begun
        text, body = "", {**BODY, "prompt": PROMPTS[number % len(PROMPTS)], "stream": True}
        try:
            async with client.post(f"{served.url}/v1/completions", json=body) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    num_begun += not text
                    if num_begun in kills:
                        os.kill(kills.pop(num_begun), signal.SIGKILL)
                    text += json.loads(line[6:])["choices"][0]["text"]
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            return None
        return text

    # A connection for each: gateways get connections, not requests.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(100)) as client:
        return await asyncio.gather(*(read(client, number) for number in range(NUM_STREAMS)))


def ask(served, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def golden(served):
    """The text of each stream, without any death."""
    choices = ask(served, "/v1/completions", {**BODY, "prompt": PROMPTS})["choices"]
    texts = [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    return [texts[number % len(PROMPTS)] for number in range(NUM_STREAMS)]


def test_a_killed_worker_and_a_killed_gateway_change_no_stream_of_the_other_gateway(served, golden):
    counter = "vllm:request_prompt_tokens_count"
    before, resumed = metric(served, counter), metric(served, "quire:resumed_total")
    kills = {16: pid_of(served, "worker-0"), 32: pid_of(served, "gateway-1")}
    texts = asyncio.run(stream_all(served, kills))
    survivors = [number for number, text in enumerate(texts) if text is not None]
    assert 8 < len(survivors) < 56, "connections are spread"
    assert [texts[number] for number in survivors] == [golden[number] for number in survivors]
    give_up_s = time.monotonic() + 30
    while metric(served, "quire:resumed_total") <= resumed:
        assert time.monotonic() < give_up_s, "a worker's counters are seen once its card is renewed"
        time.sleep(0.05)
    assert "worker ended by itself; restarting process=worker-0" in served.output
    others = [
        line for line in served.lines if "of dead workers" in line or "worker-0 quire.worker worker ready" in line
    ]
    assert "of dead workers" in others[1], "jobs wait neither for their lease nor for the restart"
    give_up_s = time.monotonic() + 30
    while served.output.count("gateway-1 quire.gateway gateway ready") < 2:
        assert time.monotonic() < give_up_s, served.output
        time.sleep(0.05)
    counts = {metric(served, counter) for _ in range(8)}
    assert len(counts) == 1, "any gateway answers for all"
    assert before + len(survivors) <= counts.pop() <= before + NUM_STREAMS, "no counter falls"


def test_a_second_service_on_the_port_is_refused_in_one_line(served, tmp_path):
    port = served.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.entry", "serve", f"--data-dir={tmp_path}", f"--port={port}"],
        capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    refusal = f"quire serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert (done.returncode, done.stderr) == (2, refusal)


def test_a_response_is_stored_for_every_gateway_and_a_signal_ends_all(served):
    made = ask(served, "/v1/responses", {"model": "demo", "input": "Tell me a story.", "max_output_tokens": 8})
    for _ in range(8):  # over a new connection each
        assert ask(served, f"/v1/responses/{made['id']}") == made
    processes = served.descendants()
    assert served.terminate() == 0, served.output
    assert alive(processes) == set()
    assert served.output.count("gateway drains") == 2

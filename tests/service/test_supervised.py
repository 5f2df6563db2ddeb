"""Gateway and worker under a supervisor: when they are ready, that they move, that they stop, and what a hang does."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest

from service.queue.embedded.redis import EmbeddedRedis
from tests.support.parts import Part
from tests.support.served import REPOSITORY

FAULTY = str(REPOSITORY / "tests" / "fakes" / "faulty_worker.py")
WATCHDOG = {"WATCHDOG_USEC": "2000000"}
NOT_READY_WITHIN_S = 5.0
BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def gateway(redis, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    flags = (f"--redis-url={redis.url}", "--port=0", "--probe-port=0", "--drain-timeout=5")
    part = Part(folder, "gateway", *flags, **WATCHDOG)
    part.until_received("READY=1")
    part.url = part.found(r"ready (http://\S+)")
    part.probe_url = f"http://127.0.0.1:{part.found(r'probes ready port=([0-9]+)')}"
    yield part
    assert part.end() == 0, part.output
    assert part.received["STOPPING=1"] == 1
    part.close()


@pytest.fixture
def start_worker(redis, tmp_path):
    started = []

    def start(*flags, name="worker"):
        command = (FAULTY, str(tmp_path / name / "orders"))
        url = f"--redis-url={redis.url}"
        started.append(Part(tmp_path / name, "worker", url, "--device=cpu", *flags, command=command, **WATCHDOG))
        started[-1].orders = tmp_path / name / "orders"
        return started[-1]

    yield start
    for part in started:
        part.close()


def asked(url, body=None):
    """Status and JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def until_status(url, status, within_s):
    """Seconds until the URL answers with this status."""
    started_s = time.monotonic()
    while asked(url)[0] != status:
        assert time.monotonic() - started_s < within_s, asked(url)
        time.sleep(0.05)
    return time.monotonic() - started_s


def readiness_urls(gateway):
    return [f"{base}/readyz" for base in (gateway.url, gateway.probe_url)]


def test_a_worker_is_ready_once_it_has_generated_and_moves_while_it_idles(gateway, start_worker):
    for url in readiness_urls(gateway):
        until_status(url, 503, 15)  # the cards of workers of other tests go stale
    worker = start_worker()
    worker.until_received("READY=1")
    assert worker.output.index("engine ready") < worker.output.index("worker ready")
    for url in readiness_urls(gateway):
        until_status(url, 200, 5)
    fed = worker.received["WATCHDOG=1"]
    worker.until_received("WATCHDOG=1", fed + 3, within_s=10)
    assert asked(f"{gateway.url}/v1/completions", BODY)[0] == 200
    assert worker.end() == 0, worker.output
    assert worker.received["STOPPING=1"] == 1


def test_the_gateway_moves(gateway):
    fed = gateway.received["WATCHDOG=1"]
    gateway.until_received("WATCHDOG=1", fed + 3, within_s=10)
    assert asked(f"{gateway.probe_url}/livez")[0] == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{gateway.probe_url}/metrics", timeout=5)


def test_a_stopped_worker_makes_the_gateway_not_ready_and_awake_it_serves_again(gateway, start_worker):
    worker = start_worker()
    worker.until_received("READY=1")
    for url in readiness_urls(gateway):
        until_status(url, 200, 5)
    worker.process.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    for url in readiness_urls(gateway):
        until_status(url, 503, NOT_READY_WITHIN_S)
    assert time.monotonic() - stopped_s < NOT_READY_WITHIN_S
    assert [asked(f"{base}/livez")[0] for base in (gateway.url, gateway.probe_url)] == [200, 200]
    worker.process.send_signal(signal.SIGCONT)
    for url in readiness_urls(gateway):
        until_status(url, 200, 5)
    assert worker.end() == 0, worker.output


@pytest.mark.parametrize("order", ["hang", "hold"])
def test_a_hung_step_makes_not_ready_starves_the_supervisor_and_its_jobs_move_on(gateway, start_worker, order):
    worker = start_worker("--step-timeout=6")
    worker.until_received("READY=1")
    for url in readiness_urls(gateway):
        until_status(url, 200, 5)
    alone = asked(f"{gateway.url}/v1/completions", BODY)
    worker.orders.write_text(order)
    answers = []
    client = threading.Thread(target=lambda: answers.append(asked(f"{gateway.url}/v1/completions", BODY)))
    client.start()
    hung_s = time.monotonic()
    for url in readiness_urls(gateway):
        until_status(url, 503, NOT_READY_WITHIN_S)
    assert time.monotonic() - hung_s < NOT_READY_WITHIN_S
    fed = worker.received["WATCHDOG=1"]
    assert worker.wait(within_s=25) == 1
    assert time.monotonic() - hung_s > 6
    assert worker.received["WATCHDOG=1"] <= fed + 1
    assert ("the engine hangs" if order == "hang" else "Timeout") in worker.output
    assert "faulty" in worker.output, "the log says where it hangs"
    assert not answers
    other = start_worker(name="other")
    client.join(45)
    assert not client.is_alive()
    assert text_of(answers[0]) == text_of(alone)
    assert other.end() == 0, other.output


def text_of(answer):
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["text"]

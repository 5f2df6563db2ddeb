"""CPU seconds that a request and a token cost a host's gateways, Redis and workers' queues.

`python -m tests.bench.host_limits` starts a Redis, `--gateways` on one port, a worker without a model, and clients that
stream. Answers of `--tokens` and of 1 token give two equations for the costs of a request and of a token.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
from redis import Redis

from service.queue.messages import WorkerCard
from service.queue.redis.connect import open_worker_queue
from tests.support.gateway_processes import start_gateway
from tests.support.measuring import flags, fresh_redis, report
from tests.support.served import REPOSITORY, descendants_of

DEMO = REPOSITORY / "model" / "demo"
MODEL = "demo"
PROMPT = "The fox met the hen by the old mill, and they talked about the weather. " * 9
NUM_STREAMS = 128
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: set[int]) -> float:
    """User and system seconds so far."""
    found = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        found += int(fields[11]) + int(fields[12])
    return found / TICKS_PER_S


async def stream(url: str, num_requests: int, num_tokens: int) -> None:
    """Read `num_requests` answers, NUM_STREAMS at once, each over a connection of its own."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    places = asyncio.Semaphore(NUM_STREAMS)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as client:

        async def one() -> None:
            async with places, client.post(f"{url}/v1/completions", json=body) as response:
                text = await response.read()
                assert response.status == 200, text
                assert text.endswith(b"data: [DONE]\n\n")

        await asyncio.gather(*(one() for _ in range(num_requests)))


class Worker:
    """A process that publishes a token of each of its jobs per step, as fast as it can."""

    def __init__(self, url: str, num_requests: int, num_tokens: int) -> None:
        work = map(str, (num_requests, num_tokens, 1, 1, NUM_STREAMS))
        command = [sys.executable, "-m", "service.bench.queue_process", "worker", "0", url, *work]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        assert self._process.stdout.readline().strip() == "ready"

    def start(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> float:
        """Wait; return its CPU seconds."""
        spent = self._process.communicate(timeout=300)[0]
        return float(spent.split()[-1])


async def announce(url: str) -> None:
    """A gateway asks for a worker's card before it accepts."""
    queue = await open_worker_queue(url)
    card = WorkerCard(
        worker_id="stub", model=MODEL, ready=True, max_model_len=2048, num_blocks=64, block_size=16, beat_at_s=0.0
    )
    await queue.announce(card)
    await queue.close()


def measure(url: str, port: int, gateways: set[int], num_requests: int, num_tokens: int) -> dict[str, float]:
    """Return CPU seconds by part, and wall seconds."""
    with Redis.from_url(url) as redis:
        parts = {"gateways": gateways, "redis": {redis.info("server")["process_id"]}}
    worker = Worker(url, num_requests, num_tokens)
    asyncio.run(announce(url))
    before, started_s = {name: cpu_s(pids) for name, pids in parts.items()}, time.monotonic()
    worker.start()
    asyncio.run(stream(f"http://127.0.0.1:{port}", num_requests, num_tokens))
    spent = {name: cpu_s(pids) - before[name] for name, pids in parts.items()}
    return {**spent, "worker": worker.end(), "wall_s": time.monotonic() - started_s}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    works = [(given.requests, given.tokens), (4 * given.requests, 1)]
    with fresh_redis() as (url, _):
        gateway, port = start_gateway(
            url, DEMO, served_model_name=MODEL, api_server_count=given.gateways, log_level="warning"
        )
        try:
            pids = descendants_of(gateway.pid) | {gateway.pid}
            measure(url, port, pids, NUM_STREAMS, 8)  # warm-up
            runs = [measure(url, port, pids, *work) for work in works]
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait(60)
    equations = np.array([(requests, requests * tokens) for requests, tokens in works], float)
    costs = {}
    for part in ("gateways", "redis", "worker"):
        request_s, token_s = np.linalg.solve(equations, [run[part] for run in runs])
        costs[part] = {
            "us_per_request": round(1e6 * request_s, 1),
            "us_per_token": round(1e6 * token_s, 2),
            "cpu_s_per_1000_tokens": round(1e3 * token_s, 4),
        }
    report({"gateways": given.gateways, "costs": costs, "runs": runs}, given.out)


if __name__ == "__main__":
    main()

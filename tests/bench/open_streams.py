"""Open streams of a gateway: added latency, memory per stream, and CPU per token with `--gateways` on one Redis.

`python -m tests.bench.open_streams --streams 5000` starts a Redis, a `quire gateway`, a stub engine and a client that
only reads. The stub gives each stream `--rate` tokens/s, in steps of `--step-ms`. Latency runs from just before the
stub publishes its step to arrival at the client, on one clock: it includes Redis and the client, which share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from array import array
from pathlib import Path

import numpy as np
from redis import Redis

from service.errors import EndReason
from service.queue.codec import pack_ids
from service.queue.messages import Event, Part, Usage
from tests.support.gateway import MODEL
from tests.support.gateway_processes import start_gateway
from tests.support.measuring import flags, fresh_redis, report
from tests.support.queue_pair import open_pair
from tests.support.wire import make_card

OPEN_WITHIN_S = 180.0
NUM_OPENING = 64
WARM_UP_S = 2.0
ID = re.compile(rb"id: (\d+)\n")
REQUEST_ID = re.compile(rb"X-Request-Id: ([0-9A-Z]+)")


class StubEngine:
    """Claim every job and publish tokens for all of them, some in each step."""

    def __init__(self, queue, token: int):
        self._queue = queue
        self._token = token
        self.job_ids: list[str] = []
        self.published_s: dict[str, list[float]] = {}

    async def claim(self, num_jobs: int) -> None:
        async with asyncio.timeout(OPEN_WITHIN_S):
            while len(self.job_ids) < num_jobs:
                for claim in await self._queue.fetch(256, 0.5):
                    self.job_ids.append(claim.job.job_id)
                    self.published_s[claim.job.job_id] = []

    async def announce(self) -> None:
        while True:
            card = make_card("stub", model=MODEL, max_model_len=4096)
            await self._queue.announce(card)
            await self._queue.renew()
            await asyncio.sleep(1.0)

    async def speak(self, rate: float, step_s: float, for_s: float) -> None:
        """Yield steps at even times; a late one is not made up for."""
        loop, position = asyncio.get_running_loop(), 0
        num_a_step = max(1, round(len(self.job_ids) * rate * step_s))
        due_s = loop.time()
        end_s = due_s + for_s
        while loop.time() < end_s:
            chosen = [self.job_ids[(position + i) % len(self.job_ids)] for i in range(num_a_step)]
            position += num_a_step
            await self._publish(chosen)
            due_s = max(due_s + step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _publish(self, job_ids: list[str]) -> None:
        now_s = time.monotonic()
        events = []
        for job_id in job_ids:
            self.published_s[job_id].append(now_s)
            number = len(self.published_s[job_id])
            events.append(Event(job_id=job_id, number=number, parts=(Part(tokens=pack_ids([self._token])),)))
        await self._queue.publish(events)

    async def end(self) -> None:
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        for start in range(0, len(self.job_ids), 256):
            await self._queue.publish(
                [
                    Event(job_id=job_id, number=len(self.published_s[job_id]) + 1, end=EndReason.LENGTH, usage=usage)
                    for job_id in self.job_ids[start : start + 256]
                ]
            )


def read_streams(port: int, num_streams: int, out: Path) -> None:
    """Run the client: open streams, print `open`, record every event's arrival until all end."""
    body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 400, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    selector = selectors.DefaultSelector()
    times, streams, numbers, names = array("d"), array("l"), array("l"), {}
    num_opened = num_closed = 0
    while num_closed < num_streams:
        while num_opened < num_streams and num_opened - len(names) < NUM_OPENING:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request)
            selector.register(connection, selectors.EVENT_READ, num_opened)
            num_opened += 1
        for key, _ in selector.select():
            data = key.fileobj.recv(65536)
            now_s = time.monotonic()
            if key.data not in names:
                names[key.data] = REQUEST_ID.search(data)[1].decode()
                if len(names) == num_streams:
                    print("open", flush=True)
            for number in ID.findall(data):
                times.append(now_s)
                streams.append(key.data)
                numbers.append(int(number))
            if not data or b"data: [DONE]" in data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                num_closed += 1
    np.savez(out, times=times, streams=streams, numbers=numbers, names=np.array([names[i] for i in range(num_streams)]))


def rss_kb(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


class GatewayAndClient:
    """A gateway process, and a client that reads its share of the streams."""

    def __init__(self, folder: Path, number: int, num_streams: int):
        self._folder = folder / f"gateway{number}"
        self._folder.mkdir()
        self._num_streams = num_streams
        self.arrivals = self._folder / "arrivals.npz"

    def start(self, redis_url: str) -> None:
        room = {"max_connections": self._num_streams + 100, "max_connections_per_client": self._num_streams + 100}
        bounds = {"max_waiting": 1 << 20, "max_waiting_tokens": 1 << 40, "max_waiting_tokens_per_tenant": 1 << 40}
        self.gateway, self._port = start_gateway(redis_url, self._folder / "model", **room, **bounds)
        self.idle_kb = rss_kb(self.gateway.pid)

    def read(self) -> None:
        words = ["--read", str(self._port), str(self._num_streams), str(self.arrivals)]
        command = [sys.executable, "-m", "tests.bench.open_streams", *words]
        self.client = subprocess.Popen(command, stdout=subprocess.PIPE)

    def stop(self) -> None:
        self.gateway.send_signal(signal.SIGTERM)
        self.gateway.wait()


async def measure(args: argparse.Namespace, folder: Path, redis_url: str) -> dict[str, float]:
    queue, redis = await open_pair(redis_url), Redis.from_url(redis_url)
    gateways = [GatewayAndClient(folder, number, args.streams // args.gateways) for number in range(args.gateways)]
    num_streams = args.streams // args.gateways * args.gateways
    stub, started = StubEngine(queue, token=65), []
    duty = asyncio.create_task(stub.announce())
    try:
        for gateway in gateways:
            await asyncio.to_thread(gateway.start, redis_url)
            started.append(gateway)
        for gateway in gateways:
            gateway.read()
        # A response starts with its first token: the stub sends one for each new job.
        await _speak_first(stub, asyncio.create_task(stub.claim(num_streams)))
        for gateway in gateways:
            await asyncio.to_thread(gateway.client.stdout.readline)
        open_kb = sum(rss_kb(gateway.gateway.pid) - gateway.idle_kb for gateway in gateways)
        num_before = sum(map(len, stub.published_s.values()))
        before_s, start_s = _cpu_of_all(gateways, redis), time.monotonic()
        await stub.speak(args.rate, args.step_ms / 1000, args.seconds + WARM_UP_S)
        end_s = time.monotonic()
        gateway_s, redis_s = (now - before for now, before in zip(_cpu_of_all(gateways, redis), before_s, strict=True))
        num_tokens = sum(map(len, stub.published_s.values())) - num_before
        busy_kb = sum(rss_kb(gateway.gateway.pid) - gateway.idle_kb for gateway in gateways)
        await stub.end()
        for gateway in gateways:
            await asyncio.to_thread(gateway.client.wait)
        latencies_ms = np.concatenate(
            [_latencies_ms(stub, gateway.arrivals, start_s + WARM_UP_S) for gateway in gateways]
        )
        return {
            "gateways": args.gateways,
            "streams": num_streams,
            "tokens_per_s": round(len(latencies_ms) / (end_s - start_s - WARM_UP_S)),
            "step_ms": args.step_ms,
            **{f"latency_ms_p{share}": round(np.percentile(latencies_ms, share), 2) for share in (50, 90, 99)},
            "kb_a_stream_open": round(open_kb / num_streams, 1),
            "kb_a_stream_busy": round(busy_kb / num_streams, 1),
            "gateway_cpu_share": round(gateway_s / (end_s - start_s) / args.gateways, 2),
            "gateway_cpu_us_a_token": round(1e6 * gateway_s / num_tokens, 1),
            "redis_cpu_us_a_token": round(1e6 * redis_s / num_tokens, 1),
            "load_average": os.getloadavg()[0],
        }
    finally:
        duty.cancel()
        for gateway in started:
            gateway.stop()
        redis.close()
        await queue.close()


def _cpu_of_all(gateways: list[GatewayAndClient], redis: Redis) -> tuple[float, float]:
    """Return CPU seconds of all gateways, and of Redis."""
    used = redis.info("cpu")
    return sum(_cpu_s(gateway.gateway.pid) for gateway in gateways), used["used_cpu_user"] + used["used_cpu_sys"]


async def _speak_first(stub: StubEngine, claiming: asyncio.Task) -> None:
    num_received = 0
    while not claiming.done() or num_received < len(stub.job_ids):
        fresh = stub.job_ids[num_received : num_received + 256]
        num_received += len(fresh)
        if fresh:
            await stub._publish(fresh)
        else:
            await asyncio.sleep(0.005)
    claiming.result()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _latencies_ms(stub: StubEngine, out: Path, since_s: float) -> np.ndarray:
    found = np.load(out)
    names = found["names"].tolist()
    latencies = []
    for arrived_s, stream, number in zip(found["times"], found["streams"], found["numbers"], strict=True):
        published = stub.published_s[names[stream]]
        if number <= len(published) and published[number - 1] >= since_s:
            latencies.append((arrived_s - published[number - 1]) * 1000)
    return np.array(latencies)


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--gateways", type=int, default=1, help="processes that share the streams")
    parser.add_argument("--rate", type=float, default=1.0, help="tokens a second and stream")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_streams(int(args.read[0]), int(args.read[1]), Path(args.read[2]))
        return
    with fresh_redis() as (url, folder):
        report(asyncio.run(measure(args, folder, url)), args.out)


if __name__ == "__main__":
    main()

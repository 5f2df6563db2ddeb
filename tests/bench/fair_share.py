"""A flood against twenty small tenants, and ten times the possible load.

`python -m tests.bench.fair_share flood` compares the TTFT of twenty tenants alone and next to one that keeps hundreds
of requests waiting; the flood starts `--head-start-s` earlier, on an empty machine. `overload` offers ten times the
peak and reports the time of refusals and the computed share of the peak. One Redis, one `quire gateway` process, and a
real job loop and engine on a device that only takes `--step-ms` per step.

`simulate` is the first in virtual time: the same queue and engine, no processes, so the same figures on any machine;
also in order of arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.output_processor import EngineOutput, iter_request_outputs
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from service.queue.interface import Claim, ClaimBudget
from service.worker.engine_thread import EngineThread, Stop
from service.worker.job_loop import EngineSizes, JobLoop, OutputInbox
from tests.bench.fair_share_steps import BLOCK_SIZE, MAX_BATCHED_TOKENS, MAX_MODEL_LEN, MAX_PREFILL_CHUNK, simulate
from tests.bench.io_thread import PacedDevice
from tests.fakes.idle_executor import IdleExecutor
from tests.support.gateway import MODEL
from tests.support.gateway_processes import start_gateway
from tests.support.measuring import flags, fresh_redis, report
from tests.support.queue_pair import QueuePair, open_pair
from tests.support.wire import make_card

NUM_BLOCKS = 65536
NUM_SMALL = 20
KEYS = ("flooder", *(f"small{number}" for number in range(NUM_SMALL)))
SETTLE_S = 1.0
FLOODED_SHARE = 0.8


class WatchedQueue:
    """Queue that records how long jobs waited for their claim."""

    def __init__(self, queue: QueuePair):
        self._queue = queue
        self.waited_ms: dict[str, list[float]] = {}  # by tenant, seconds from acceptance to claim

    def __getattr__(self, name: str) -> object:
        return getattr(self._queue, name)

    async def fetch(self, max_branches: int, wait_s: float, budget: ClaimBudget) -> Sequence[Claim]:
        claims = await self._queue.fetch(max_branches, wait_s, budget)
        if claims:
            now_s = await self._queue.now_s()
            for claim in claims:
                waited_ms = (now_s - claim.job.submitted_at_s) * 1000
                self.waited_ms.setdefault(claim.job.tenant, []).append(waited_ms)
        return claims


class IdleWorker:
    """Worker on a device that computes nothing in `step_s`: one token per step for `num_slots` sequences."""

    def __init__(self, queue: QueuePair, num_slots: int, step_s: float):
        self.queue, self.num_slots, self.step_s = WatchedQueue(queue), num_slots, step_s
        self.num_tokens = 0
        executor = IdleExecutor()
        PacedDevice(executor, step_s)
        kv = KVManager(NUM_BLOCKS, BLOCK_SIZE)
        limits = Limits(
            max_num_seqs=num_slots,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_prefill_chunk=MAX_PREFILL_CHUNK,
            max_model_len=MAX_MODEL_LEN,
        )
        self.engine = Engine(executor, Scheduler(kv, limits), frozenset())
        card = {"model": MODEL, "max_model_len": MAX_MODEL_LEN}
        self._deaths: list[BaseException] = []
        self._inbox = OutputInbox()
        self._thread = EngineThread(self.engine, self._on_outputs, self._deaths.append)
        self._job_loop = JobLoop(
            self.queue,
            self._thread,
            self._inbox,
            lambda ready: make_card("idle", ready=ready, **card),
            EngineSizes(MAX_MODEL_LEN, num_slots, NUM_BLOCKS * BLOCK_SIZE),
        )

    async def run(self) -> None:
        self._thread.start()
        try:
            await self._job_loop.run()
        finally:
            self._thread.send(Stop(EndReason.SHUTDOWN))

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        self.num_tokens += sum(len(part.token_ids) for output in iter_request_outputs(outputs) for part in output.parts)
        self._inbox.on_outputs(outputs)

    @property
    def num_running(self) -> int:
        return len(self.engine.running)


@dataclass(frozen=True)
class Asked:
    """Result of one request."""

    status: int
    first_ms: float  # until the first event, or the refusal
    has_retry_after: bool


class Clients:
    def __init__(self, http: aiohttp.ClientSession, port: int, max_tokens: int):
        self._http = http
        self.port = port
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._max_tokens = max_tokens
        self._chance = random.Random(3)

    async def ask(self, key: str) -> Asked:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        headers = {"Authorization": f"Bearer {key}"}
        # Lengths differ, as a model's do; else all slots would become free together.
        max_tokens = self._chance.randrange(self._max_tokens // 2, 3 * self._max_tokens // 2 + 1)
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True}
        async with self._http.post(self._url, json=body, headers=headers) as response:
            await response.content.readany()
            first_ms = (loop.time() - start_s) * 1000
            await response.read()
            return Asked(response.status, first_ms, "Retry-After" in response.headers)

    async def now_and_then(self, keys, rate: float, for_s: float, chance: random.Random) -> list[Asked]:
        """Send `rate` requests/s per key at random times, open loop."""
        loop = asyncio.get_running_loop()
        end_s, asking = loop.time() + for_s, []
        due_s = loop.time()
        while (due_s := due_s + chance.expovariate(rate * len(keys))) < end_s:
            await asyncio.sleep(due_s - loop.time())
            asking.append(asyncio.create_task(self.ask(chance.choice(keys))))
        return list(await asyncio.gather(*asking))

    async def without_end(self, key: str) -> None:
        while True:
            if (await self.ask(key)).status != 200:
                await asyncio.sleep(0.2)


async def flood(clients: Clients, worker: IdleWorker, args: argparse.Namespace) -> dict[str, object]:
    chance = random.Random(1)
    small = KEYS[1:]
    alone = await clients.now_and_then(small, args.rate, args.seconds, chance)
    waited_alone = worker.queue.waited_ms
    # Its own process: the small tenants' client must not also read two hundred streams.
    words = [f"--port={clients.port}", f"--flood={args.flood}", f"--tokens={args.flood_tokens or args.tokens}"]
    flooding = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.bench.fair_share", "flooder", *words)
    while worker.num_running < worker.num_slots * FLOODED_SHARE:
        await asyncio.sleep(0.05)
    await asyncio.sleep(args.head_start_s)
    tokens_before, loop = worker.num_tokens, asyncio.get_running_loop()
    start_s, worker.queue.waited_ms = loop.time(), {}
    beside = await clients.now_and_then(small, args.rate, args.seconds, chance)
    busy = (worker.num_tokens - tokens_before) * worker.step_s / worker.num_slots / (loop.time() - start_s)
    waits = [
        [wait for tenant, found in waited.items() if tenant != flooder for wait in found]
        for flooder in [max(worker.queue.waited_ms, key=lambda tenant: len(worker.queue.waited_ms[tenant]))]
        for waited in (waited_alone, worker.queue.waited_ms)
    ]
    flooding.kill()
    await flooding.wait()
    alone_ms, beside_ms = ([asked.first_ms for asked in found] for found in (alone, beside))
    ratios = [np.percentile(beside_ms, share) / np.percentile(alone_ms, share) for share in (50, 99)]
    return {
        "small_tenants": len(small),
        "flooder_keeps_waiting": args.flood,
        "flood_begins_before_s": args.head_start_s,
        "tokens_of_small_and_flood": [args.tokens, args.flood_tokens or args.tokens],
        "preemptions": worker.engine.stats().num_preemptions,
        "slots_busy": round(busy, 3),
        "refused": sum(asked.status != 200 for asked in beside),
        "requests": [len(alone), len(beside)],
        "ttft_ms_alone_p50_p99": [round(float(np.percentile(alone_ms, share)), 1) for share in (50, 99)],
        "ttft_ms_beside_p50_p99": [round(float(np.percentile(beside_ms, share)), 1) for share in (50, 99)],
        "waited_ms_alone_p50_p99": [round(float(np.percentile(waits[0], share)), 1) for share in (50, 99)],
        "waited_ms_beside_p50_p99": [round(float(np.percentile(waits[1], share)), 1) for share in (50, 99)],
        "ratio_p50_p99": [round(float(ratio), 2) for ratio in ratios],
    }


async def overload(clients: Clients, worker: IdleWorker, args: argparse.Namespace) -> dict[str, object]:
    loop = asyncio.get_running_loop()

    async def tokens_per_s(work) -> tuple[float, object]:
        before, start_s = worker.num_tokens, loop.time()
        found = await work
        return (worker.num_tokens - before) / (loop.time() - start_s), found

    enough = [asyncio.create_task(clients.without_end(KEYS[1 + i % NUM_SMALL])) for i in range(worker.num_slots * 2)]
    await asyncio.sleep(SETTLE_S)
    peak, _ = await tokens_per_s(asyncio.sleep(args.seconds))
    for task in enough:
        task.cancel()
    await asyncio.gather(*enough, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)
    jobs_per_s = worker.num_slots / (args.tokens * worker.step_s)
    flooding = asyncio.create_task(
        clients.now_and_then(KEYS[1:], 10 * jobs_per_s / NUM_SMALL, args.seconds + SETTLE_S, random.Random(2))
    )
    await asyncio.sleep(SETTLE_S)
    goodput, _ = await tokens_per_s(asyncio.sleep(args.seconds))
    asked = await flooding
    refused = [one for one in asked if one.status in (429, 503)]
    refused_ms = [one.first_ms for one in refused]
    return {
        "offered_per_s": round(len(asked) / (args.seconds + SETTLE_S)),
        "peak_tokens_per_s": round(peak),
        "goodput_tokens_per_s": round(goodput),
        "goodput_share": round(goodput / peak, 3),
        "answered": sum(one.status == 200 for one in asked),
        "refused": len(refused),
        "other": len(asked) - len(refused) - sum(one.status == 200 for one in asked),
        "all_say_when": all(one.has_retry_after for one in refused),
        "refusal_ms_p50_p90_p99": [round(float(np.percentile(refused_ms, share)), 1) for share in (50, 90, 99)],
    }


async def keep_flooding(args: argparse.Namespace) -> None:
    """Run the flooding client until it is killed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = Clients(http, args.port, args.tokens)
        await asyncio.gather(*(clients.without_end("flooder") for _ in range(args.flood)))


async def measure(args: argparse.Namespace, folder: Path, redis_url: str) -> dict[str, object]:
    queue = await open_pair(redis_url)
    bounds = {} if args.scenario == "flood" else {"max_waiting": 4 * args.slots}
    gateway, port = await asyncio.to_thread(
        start_gateway, redis_url, folder / "model", api_key=",".join(KEYS), max_connections_per_client=8192,
        max_open_per_key=8192, **bounds,
    )  # fmt: skip
    worker = IdleWorker(queue, args.slots, args.step_ms / 1000)
    working = asyncio.create_task(worker.run())
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            clients = Clients(http, port, args.tokens)
            await asyncio.gather(*(clients.ask(key) for key in KEYS))
            measuring = asyncio.create_task((flood if args.scenario == "flood" else overload)(clients, worker, args))
            done, _ = await asyncio.wait({measuring, working}, return_when=asyncio.FIRST_COMPLETED)
            found = done.pop().result()  # a worker ends only by failing
        return {**found, "step_ms": args.step_ms, "slots": args.slots, "load_average": round(os.getloadavg()[0], 1)}
    finally:
        working.cancel()
        await asyncio.wait({working}, timeout=2.0)
        gateway.send_signal(signal.SIGTERM)
        gateway.wait()
        await queue.close()


def main(given: Sequence[str] | None = None) -> None:
    parser = flags(__doc__)
    parser.add_argument("scenario", choices=("flood", "overload", "simulate", "flooder"))
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=25, help="of each answer, on average")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second of each small tenant")
    parser.add_argument("--flood", type=int, default=200, help="requests that the flooder keeps waiting")
    parser.add_argument("--flood-tokens", type=int, help="of each of its answers; without it as many as --tokens")
    parser.add_argument("--head-start-s", type=float, default=2.0, help="how long the flood is alone before the others")
    parser.add_argument("--prompt", type=int, default=3, help="tokens of each prompt")
    parser.add_argument("--flood-prompt", type=int, help="of the flood's; without it as many as --prompt")
    parser.add_argument("--blocks", type=int, default=65536, help="of 16 tokens that the engine has; for simulate")
    parser.add_argument("--port", type=int, help="of the gateway to flood; for flooder, which flood starts")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args(given)
    if args.scenario == "simulate":
        report(simulate(args, NUM_SMALL), args.out)
        return
    if args.scenario == "flooder":
        asyncio.run(keep_flooding(args))
        return
    with fresh_redis() as (url, folder):
        report(asyncio.run(measure(args, folder, url)), args.out)


if __name__ == "__main__":
    main()

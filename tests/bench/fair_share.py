"""A flood against twenty small tenants, and ten times as much as can be worked off: what each of them gets.

`python -m tests.bench.fair_share flood` compares the time to first token of twenty tenants that ask now and then, alone
and beside one that keeps hundreds of requests waiting. `python -m tests.bench.fair_share overload` offers ten times the
peak and tells how fast the refusals are and what share of the peak is still worked off. One Redis, one `quire gateway`
in a process of its own, and in the engine's place a stub that works in steps as an engine does: in each step every
running request gets one token, and what ends makes room for the next step.

`python -m tests.bench.fair_share simulate` is the first of these in virtual time: the same queue, no processes, so the
same figures on any machine; and beside it what they would be if jobs were claimed in the order of their coming. The
first seconds, in which a flood finds an empty machine and takes all of it at once, are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from model.sampling_params import SamplingParams
from service.errors import EndReason
from service.wire.codec import pack_ids
from service.wire.fair_queue import FairQueue, cost_of
from service.wire.messages import Event, Job, Part, Usage
from service.wire.redis_broker import open_redis_broker
from service.worker.places import Places
from tests.support.doors import start_gateway
from tests.support.gateway import MODEL
from tests.support.measuring import flags, fresh_redis, tell
from tests.support.wire import make_card, make_job

NUM_SMALL = 20
KEYS = ("flooder", *(f"small{number}" for number in range(NUM_SMALL)))
SETTLE_S = 1.0
WARM_UP_MS = 5000.0
NO_LACK_OF_BLOCKS = 1 << 40
FLOODED_SHARE = 0.8


@dataclass
class StepEngine:
    """`num_slots` requests at once, a token for each in every step of `step_s`; jobs are claimed as slots get free."""

    broker: object
    num_slots: int
    step_s: float
    num_tokens: int = 0
    waited_ms: dict[str, list[float]] = field(default_factory=dict)  # tenant -> from acceptance to claim, of each job
    _running: dict[str, list[int]] = field(default_factory=dict)  # job -> tokens left, last event's number
    _places: Places = field(init=False)

    def __post_init__(self) -> None:
        self._places = Places(self.num_slots, is_ahead=False)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            free, room = self._places.room(NO_LACK_OF_BLOCKS, loop.time())
            claims = await self.broker.fetch(free, 0.0, room) if free > 0 else ()
            now_s = await self.broker.now_s()
            for claim in claims:
                self.waited_ms.setdefault(claim.job.tenant, []).append((now_s - claim.job.submitted_at_s) * 1000)
                self._running[claim.job.job_id] = [claim.job.sampling.max_tokens, 0]
                self._places.take(claim.job, 0, loop.time())
            due_s = max(due_s + self.step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            if self._running:
                await self.broker.publish([self._event(job_id) for job_id in list(self._running)])

    def _event(self, job_id: str) -> Event:
        entry = self._running[job_id]
        entry[0], entry[1] = entry[0] - 1, entry[1] + 1
        self.num_tokens += 1
        parts = (Part(tokens=pack_ids([65])),)
        if entry[0]:
            return Event(job_id=job_id, number=entry[1], parts=parts)
        self._give_back(job_id)
        usage = Usage(prompt_tokens=1, completion_tokens=entry[1])
        return Event(job_id=job_id, number=entry[1], parts=parts, end=EndReason.LENGTH, usage=usage)

    def _give_back(self, job_id: str) -> None:
        del self._running[job_id]
        self._places.give_back(job_id, asyncio.get_running_loop().time())

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def beat(self) -> None:
        while True:
            card = make_card("stub", model=MODEL, max_model_len=4096)
            await self.broker.announce(card)
            await self.broker.renew()
            await asyncio.sleep(1.0)

    async def hear_cancels(self) -> None:
        while True:
            for cancel in await self.broker.fetch_cancels(0.5):
                if entry := self._running.get(cancel.job_id):
                    self._give_back(cancel.job_id)
                    usage = Usage(prompt_tokens=1, completion_tokens=entry[1])
                    end = Event(job_id=cancel.job_id, number=entry[1] + 1, end=cancel.reason, usage=usage)
                    await self.broker.publish([end])


@dataclass(frozen=True)
class Asked:
    """What became of one request."""

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
        # Answers end at different times, as those of a model do; else all slots would become free together.
        max_tokens = self._chance.randrange(self._max_tokens // 2, 3 * self._max_tokens // 2 + 1)
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True}
        async with self._http.post(self._url, json=body, headers=headers) as response:
            await response.content.readany()
            first_ms = (loop.time() - start_s) * 1000
            await response.read()
            return Asked(response.status, first_ms, "Retry-After" in response.headers)

    async def now_and_then(self, keys, rate: float, for_s: float, chance: random.Random) -> list[Asked]:
        """Each key asks `rate` times a second, at random moments, answered or not."""
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


async def flood(clients: Clients, engine: StepEngine, args: argparse.Namespace) -> dict[str, object]:
    chance = random.Random(1)
    small = KEYS[1:]
    alone = await clients.now_and_then(small, args.rate, args.seconds, chance)
    waited_alone = engine.waited_ms
    # A process of its own: the small ones' times are not to be those of a client that reads two hundred streams beside.
    words = [f"--port={clients.port}", f"--flood={args.flood}", f"--tokens={args.tokens}"]
    flooding = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.bench.fair_share", "flooder", *words)
    while engine.num_running < engine.num_slots * FLOODED_SHARE:
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE_S * 2)
    tokens_before, loop = engine.num_tokens, asyncio.get_running_loop()
    start_s, engine.waited_ms = loop.time(), {}
    beside = await clients.now_and_then(small, args.rate, args.seconds, chance)
    busy = (engine.num_tokens - tokens_before) * engine.step_s / engine.num_slots / (loop.time() - start_s)
    waits = [
        [wait for tenant, found in waited.items() if tenant != flooder for wait in found]
        for flooder in [max(engine.waited_ms, key=lambda tenant: len(engine.waited_ms[tenant]))]
        for waited in (waited_alone, engine.waited_ms)
    ]
    flooding.kill()
    await flooding.wait()
    alone_ms, beside_ms = ([asked.first_ms for asked in found] for found in (alone, beside))
    ratios = [np.percentile(beside_ms, share) / np.percentile(alone_ms, share) for share in (50, 99)]
    return {
        "small_tenants": len(small),
        "flooder_keeps_waiting": args.flood,
        "slots_busy": round(busy, 3),
        "refused": sum(asked.status != 200 for asked in beside),
        "requests": [len(alone), len(beside)],
        "ttft_ms_alone_p50_p99": [round(float(np.percentile(alone_ms, share)), 1) for share in (50, 99)],
        "ttft_ms_beside_p50_p99": [round(float(np.percentile(beside_ms, share)), 1) for share in (50, 99)],
        "waited_ms_alone_p50_p99": [round(float(np.percentile(waits[0], share)), 1) for share in (50, 99)],
        "waited_ms_beside_p50_p99": [round(float(np.percentile(waits[1], share)), 1) for share in (50, 99)],
        "ratio_p50_p99": [round(float(ratio), 2) for ratio in ratios],
    }


def simulate(args: argparse.Namespace) -> dict[str, object]:
    """The flood in virtual time: in each step the queue fills the slots that are free, and a job's first token is there
    a step later."""
    found: dict[str, object] = {}
    for order in ("by_turns", "by_arrival"):
        first_ms = {}
        for beside in (False, True):
            first_ms[beside] = _simulate_steps(args, order, beside)
        for share in (50, 99):
            alone, beside = (float(np.percentile(first_ms[is_beside], share)) for is_beside in (False, True))
            found[f"{order}_ttft_ms_p{share}_alone_beside_ratio"] = [
                round(alone, 1),
                round(beside, 1),
                round(beside / alone, 2),
            ]
    return {
        **found,
        "small_tenants": NUM_SMALL,
        "flooder_keeps_waiting": args.flood,
        "slots": args.slots,
        "step_ms": args.step_ms,
    }


def _simulate_steps(args: argparse.Namespace, order: str, with_flooder: bool) -> list[float]:
    """Times to first token of the small tenants, in ms."""
    chance, queue, first_ms = random.Random(7), FairQueue(), []
    places = Places(args.slots, is_ahead=False)
    arrivals: dict[str, float] = {}
    running: list[tuple[Job, int]] = []  # with tokens left
    now_ms, next_ms, number = 0.0, 0.0, 0
    end_ms = args.seconds * 10_000

    def arrive(tenant: str, at_ms: float) -> None:
        nonlocal number
        number += 1
        tokens = chance.randrange(args.tokens // 2, 3 * args.tokens // 2 + 1)
        arrivals[f"{number:08}"] = at_ms
        sampling = SamplingParams(max_tokens=tokens)
        # One tenant for all: then its own jobs go by age, which is the order of their coming.
        job = make_job(f"{number:08}", tenant=tenant if order == "by_turns" else "all", sampling=sampling, feed=tenant)
        queue.add(job)
        waiting[job.job_id] = job

    waiting: dict[str, Job] = {}
    while now_ms < end_ms:
        while next_ms <= now_ms:
            arrive(f"small{chance.randrange(NUM_SMALL)}", next_ms)
            next_ms += chance.expovariate(args.rate * NUM_SMALL / 1000)
        num_flooding = sum(job.feed == "flooder" for job in waiting.values())
        for _ in range(args.flood - num_flooding if with_flooder else 0):
            arrive("flooder", now_ms)
        for job, left in running:
            if left == 1:
                places.give_back(job.job_id, now_ms / 1000)
                queue.settle(job, cost_of(job))
        running = [(job, left - 1) for job, left in running if left > 1]
        while (job_id := _next(queue, places, now_ms / 1000)) is not None:
            job = waiting.pop(job_id)
            queue.remove(job_id)
            queue.charge(job)
            running.append((job, job.sampling.max_tokens))
            places.take(job, 0, now_ms / 1000)
            if job.feed != "flooder" and now_ms > WARM_UP_MS:
                first_ms.append(now_ms - arrivals[job_id] + args.step_ms)
        now_ms += args.step_ms
    return first_ms


def _next(queue: FairQueue, places: Places, now_s: float) -> str | None:
    free, room = places.room(NO_LACK_OF_BLOCKS, now_s)
    return queue.next(room.kept_from if free <= room.num_kept else ()) if free > 0 else None


async def overload(clients: Clients, engine: StepEngine, args: argparse.Namespace) -> dict[str, object]:
    loop = asyncio.get_running_loop()

    async def tokens_per_s(work) -> tuple[float, object]:
        before, start_s = engine.num_tokens, loop.time()
        found = await work
        return (engine.num_tokens - before) / (loop.time() - start_s), found

    enough = [asyncio.create_task(clients.without_end(KEYS[1 + i % NUM_SMALL])) for i in range(engine.num_slots * 2)]
    await asyncio.sleep(SETTLE_S)
    peak, _ = await tokens_per_s(asyncio.sleep(args.seconds))
    for task in enough:
        task.cancel()
    await asyncio.gather(*enough, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)
    jobs_per_s = engine.num_slots / (args.tokens * engine.step_s)
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
    """What the flooder's process does until it is killed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = Clients(http, args.port, args.tokens)
        await asyncio.gather(*(clients.without_end("flooder") for _ in range(args.flood)))


async def measure(args: argparse.Namespace, folder: Path, redis_url: str) -> dict[str, object]:
    broker = await open_redis_broker(redis_url)
    bounds = {} if args.scenario == "flood" else {"max_waiting": 4 * args.slots}
    gateway, port = await asyncio.to_thread(
        start_gateway, redis_url, folder / "model", api_key=",".join(KEYS), max_connections_per_client=8192,
        max_open_per_key=8192, **bounds,
    )  # fmt: skip
    engine = StepEngine(broker, args.slots, args.step_ms / 1000)
    duties = [asyncio.create_task(duty()) for duty in (engine.run, engine.beat, engine.hear_cancels)]
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            clients = Clients(http, port, args.tokens)
            await asyncio.gather(*(clients.ask(key) for key in KEYS))
            measuring = asyncio.create_task((flood if args.scenario == "flood" else overload)(clients, engine, args))
            done, _ = await asyncio.wait({measuring, *duties}, return_when=asyncio.FIRST_COMPLETED)
            found = done.pop().result()  # a duty ends by failing only
        return {**found, "step_ms": args.step_ms, "slots": args.slots, "load_average": round(os.getloadavg()[0], 1)}
    finally:
        for duty in duties:
            duty.cancel()
        await asyncio.wait(duties, timeout=2.0)
        gateway.send_signal(signal.SIGTERM)
        gateway.wait()
        await broker.close()


def main(given: Sequence[str] | None = None) -> None:
    parser = flags(__doc__)
    parser.add_argument("scenario", choices=("flood", "overload", "simulate", "flooder"))
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=25, help="of each answer, on average")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second of each small tenant")
    parser.add_argument("--flood", type=int, default=200, help="requests that the flooder keeps waiting")
    parser.add_argument("--port", type=int, help="of the gateway to flood; for flooder, which flood starts")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args(given)
    if args.scenario == "simulate":
        tell(simulate(args), args.out)
        return
    if args.scenario == "flooder":
        asyncio.run(keep_flooding(args))
        return
    with fresh_redis() as (url, folder):
        tell(asyncio.run(measure(args, folder, url)), args.out)


if __name__ == "__main__":
    main()

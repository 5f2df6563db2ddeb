"""Clients that leave at random moments: how soon the blocks of their requests are freed, and whether any leak.

`python -m tests.chaos.cancels --times 10000` opens streams at a gateway with a real Redis and a worker with the demo
model, all but Redis in this process, drops each at a random moment, and notes when the engine freed its blocks.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from bisect import bisect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from redis import Redis

from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.engine.stats import EngineStats
from service.errors import EndReason
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from service.queue import keys
from service.worker.engine_thread import EngineThread, Stop
from service.worker.job_loop import EngineSizes, JobLoop, OutputInbox
from tests.support.demo_engine import DEMO
from tests.support.measuring import flags, fresh_redis, report
from tests.support.queue_pair import open_pair
from tests.support.wire import make_card

MODEL = "demo"
NUM_BLOCKS = 2048
NUM_SLOTS = 24
MARGIN_S = 0.05
MEAN_STAY_S = 0.15
PATIENCE_S = 30.0


@dataclass
class Notes:
    """Monotonic seconds, by request id."""

    left_at_s: dict[str, float] = field(default_factory=dict)
    freed_at_s: dict[str, float] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    step_ended_at_s: list[float] = field(default_factory=list)
    num_whole: int = 0

    def two_steps_s(self, moment_s: float) -> float:
        """Return the duration of the next two steps that ended after the moment."""
        first = bisect(self.step_ended_at_s, moment_s)
        return sum(self.step_s[first : first + 2])


def watched(built: BuiltEngine, notes: Notes) -> BuiltEngine:
    """Note when the engine drops a cancelled request, and how long its steps take."""
    engine, cancel, step = built.engine, built.engine.cancel, built.engine.step

    def cancel_and_note(request_id: str, reason: EndReason, branch: int | None = None) -> None:
        cancel(request_id, reason, branch)
        notes.freed_at_s[request_id.rpartition("/")[0]] = time.monotonic()

    def step_and_note() -> None:
        start_s = time.monotonic()
        step()
        notes.step_ended_at_s.append(time.monotonic())
        notes.step_s.append(notes.step_ended_at_s[-1] - start_s)

    engine.cancel, engine.step = cancel_and_note, step_and_note
    return built


@asynccontextmanager
async def working(redis_url: str, built: BuiltEngine) -> AsyncIterator[EngineThread]:
    """Run a worker, wired as in its process."""
    queue = await open_pair(redis_url)
    memory = built.memory
    sizes = {"max_model_len": memory.max_model_len, "num_blocks": memory.num_blocks, "block_size": memory.block_size}
    failed = asyncio.get_running_loop().create_future()
    loop, inbox = asyncio.get_running_loop(), OutputInbox()
    engine = EngineThread(
        built.engine, inbox.on_outputs, lambda error: loop.call_soon_threadsafe(failed.set_exception, error)
    )
    job_loop = JobLoop(
        queue,
        engine,
        inbox,
        lambda ready: make_card("w", model=MODEL, ready=ready, **sizes),
        EngineSizes(built.config.vocab_size, NUM_SLOTS, memory.num_blocks * memory.block_size),
    )
    engine.start()
    duties = asyncio.create_task(job_loop.run())
    await job_loop.announced.wait()
    try:
        yield engine
    finally:
        engine.send(Stop(EndReason.SHUTDOWN))
        duties.cancel()
        await asyncio.wait({duties})
        engine.join(10)
        await queue.close()
        if failed.done():
            failed.result()


async def leave(http: aiohttp.ClientSession, url: str, chance: random.Random, notes: Notes) -> None:
    """Send a request and leave."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    body |= chance.choice(({}, {"n": 3}, {"temperature": 0}, {"logprobs": 2}))
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        request_id = response.headers["X-Request-Id"]
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.expovariate(1 / MEAN_STAY_S)):
                async for _ in response.content.iter_any():
                    pass
                notes.num_whole += 1
                return
        notes.left_at_s[request_id] = time.monotonic()
        response.close()


async def run(redis_url: str, times: int, num_at_once: int) -> dict[str, object]:
    settings = Settings(
        model=DEMO, served_model_name=MODEL, port=0, device="cpu", num_gpu_blocks=NUM_BLOCKS, max_num_seqs=NUM_SLOTS,
        max_connections_per_client=4096, drain_timeout=1.0,
    )  # fmt: skip
    notes, chance = Notes(), random.Random(5)
    built = watched(await asyncio.to_thread(build_engine, settings, progress=False), notes)
    notes.step_s.clear()
    notes.step_ended_at_s.clear()
    gateway = await open_pair(redis_url)
    at_once = asyncio.Semaphore(num_at_once)
    async with (
        working(redis_url, built) as engine,
        serving(settings, ServedModel.read(settings), gateway) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):

        async def one() -> None:
            async with at_once:
                await leave(http, url, chance, notes)

        start_s = time.monotonic()
        await asyncio.gather(*(one() for _ in range(times)))
        elapsed_s = time.monotonic() - start_s
        stats = await _idle(engine, built)
    await gateway.close()
    with Redis.from_url(redis_url) as redis:
        num_left = sum(redis.hlen(key) for key in (keys.JOBS, keys.STATES, keys.CLAIMS))
    left = {"blocks_left": stats.num_blocks_used, "jobs_left": num_left}
    return {**_figures(notes), **left, "elapsed_s": round(elapsed_s, 1)}


async def _idle(engine: EngineThread, built: BuiltEngine) -> EngineStats:
    """Return the engine's statistics once it is idle."""
    async with asyncio.timeout(PATIENCE_S):
        while built.engine.has_work:
            await asyncio.sleep(0.02)
    return built.engine.stats()


def _figures(notes: Notes) -> dict[str, object]:
    left_at_s = [(one, left_s) for one, left_s in notes.left_at_s.items() if one in notes.freed_at_s]
    waits_s = [notes.freed_at_s[one] - left_s for one, left_s in left_at_s]
    beyond_s = [wait_s - notes.two_steps_s(left_s) for wait_s, (_, left_s) in zip(waits_s, left_at_s, strict=True)]
    step_s, long_step_s = (float(np.percentile(notes.step_s, share)) for share in (50, 99))
    p50, p99 = (float(np.percentile(waits_s, share)) for share in (50, 99))
    return {
        "left": len(notes.left_at_s),
        "received_whole": notes.num_whole,
        "never_in_the_engine": len(notes.left_at_s) - len(waits_s),
        "free_after_ms_p50_p99_max": [round(1e3 * value, 1) for value in (p50, p99, max(waits_s))],
        "step_ms_p50_p99": [round(1e3 * step_s, 1), round(1e3 * long_step_s, 1)],
        "beyond_two_steps_ms_p50_p99": [round(1e3 * float(np.percentile(beyond_s, share)), 1) for share in (50, 99)],
        "within_two_steps_and_50_ms": round(float(np.mean(np.array(beyond_s) <= MARGIN_S)), 4),
    }


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--times", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=16)
    args = parser.parse_args()
    with fresh_redis() as (url, _):
        figures = asyncio.run(run(url, args.times, args.at_once))
    report(figures, args.out)
    return int(bool(figures["blocks_left"] or figures["jobs_left"]))


if __name__ == "__main__":
    sys.exit(main())

"""Cost of publishing tokens for the engine: the I/O thread shares the interpreter with the engine thread.

`python -m tests.bench.io_thread --batch 200 --step-ms 9` runs the real engine thread, job loop, queue and a Redis, on a
device that computes nothing. In each round every token is published, then, with new jobs, only the last of each. Steps
of all `--batch` sequences count.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from itertools import pairwise

import numpy as np
import uvloop

from model.sampling_params import SamplingParams
from service.engine.output_processor import NewTokens
from service.garbage import freeze_heap
from service.queue.codec import pack_ids
from service.queue.messages import Job
from service.worker.engine_thread import EngineThread
from service.worker.job_loop import EngineSizes, JobLoop, OutputInbox
from tests.bench.host_steps import VOCAB_SIZE, make_engine
from tests.support.measuring import flags, fresh_redis, report
from tests.support.queue_pair import open_pair
from tests.support.wire import make_card

NUM_PROMPT_TOKENS = 100
PATIENCE_S = 300.0


class PacedDevice:
    """Executor whose steps take `step_s` each, one after another."""

    def __init__(self, executor, step_s: float):
        self._launch, self._collect = executor.launch, executor.collect
        self._step_s = step_s
        self._free_at_s = 0.0
        self._done_at_s: deque[float] = deque()
        executor.launch, executor.collect = self.launch, self.collect

    def launch(self, plan):
        launched = self._launch(plan)
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + self._step_s
        self._done_at_s.append(self._free_at_s)
        return launched

    def collect(self, launched):
        left_s = self._done_at_s.popleft() - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return self._collect(launched)


class Steps:
    """Recorder of the start of each full-batch step; filters the published outputs."""

    def __init__(self, engine, batch: int):
        self._step, self._engine, self._batch = engine.step, engine, batch
        self._began_s: list[float | None] = []  # None: not a full batch
        engine.step = self.step
        self.are_reported = True

    def step(self) -> None:
        is_whole = len(self._engine.running) == self._batch
        self._began_s.append(time.perf_counter() if is_whole else None)
        self._step()

    def pass_on(self, inbox: OutputInbox):
        def on_outputs(outputs) -> None:
            left = outputs if self.are_reported else [each for each in outputs if type(each) is not NewTokens]
            if left:
                inbox.on_outputs(left)

        return on_outputs

    def take_ms(self) -> list[float]:
        began_s, self._began_s = self._began_s, []
        return [1000 * (later - earlier) for earlier, later in pairwise(began_s) if earlier and later]


async def measure(args: argparse.Namespace, redis_url: str) -> dict[str, object]:
    engine, executor = make_engine(args.batch, NUM_PROMPT_TOKENS + args.steps + 16, prefix_caching=True)
    PacedDevice(executor, args.step_ms / 1000)
    steps, deaths = Steps(engine, args.batch), []
    queue, gateway = [await open_pair(redis_url) for _ in range(2)]
    inbox = OutputInbox()
    thread = EngineThread(engine, steps.pass_on(inbox), deaths.append)
    sizes = EngineSizes(VOCAB_SIZE, args.batch, 1 << 30)
    job_loop = JobLoop(queue, thread, inbox, lambda ready: make_card("bench", ready=ready), sizes)
    freeze_heap()
    thread.start()
    duties = asyncio.create_task(job_loop.run())
    found: dict[str, list[float]] = {"received": [], "kept": []}
    try:
        for number in range(2 * args.rounds):
            steps.are_reported = number % 2 == 0
            async with asyncio.timeout(PATIENCE_S):
                await run_jobs(gateway, job_loop, args, number)
            found["received" if steps.are_reported else "kept"] += steps.take_ms()
            if deaths:
                raise deaths[0]
    finally:
        duties.cancel()
        await asyncio.gather(duties, return_exceptions=True)
        for each in (queue, gateway):
            await each.close()
    received, kept = np.array(found["received"]), np.array(found["kept"])
    return {
        "batch": args.batch,
        "step_ms": args.step_ms,
        "steps": [len(received), len(kept)],
        "told_ms_mean_p50_p99": [round(float(ms), 3) for ms in (received.mean(), *np.percentile(received, (50, 99)))],
        "kept_ms_mean_p50_p99": [round(float(ms), 3) for ms in (kept.mean(), *np.percentile(kept, (50, 99)))],
        "cost_share": round(float(received.mean() / kept.mean() - 1), 4),
    }


async def run_jobs(gateway, job_loop: JobLoop, args: argparse.Namespace, number: int) -> None:
    params = SamplingParams(max_tokens=args.steps, temperature=0.7, ignore_eos=True)
    for place in range(args.batch):
        job = Job(
            job_id=f"{number:013}{place:013}",
            tenant="t",
            prompt=pack_ids(range(NUM_PROMPT_TOKENS)),
            sampling=params,
            submitted_at_s=time.time(),
            feed="bench",
        )
        await gateway.submit(job)
    while (await gateway.queue_state()).num_waiting or job_loop.num_open:
        await asyncio.sleep(0.05)


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=9.0)
    parser.add_argument("--steps", type=int, default=300, help="tokens of each job")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with fresh_redis() as (url, _):
        report(uvloop.run(measure(args, url)), args.out)


if __name__ == "__main__":
    main()

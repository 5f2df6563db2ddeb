"""The flood of `fair_share` in virtual time: real queue, slots and engine on a device that computes nothing. Every step
takes `--step-ms`, so that the figures are the same on any machine."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import numpy as np

from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.queue.interface import UNBOUNDED
from service.queue.messages import Event, Usage
from service.worker.capacity import SlotCapacity
from tests.fakes.idle_executor import IdleExecutor
from tests.fakes.queue.queue_data import QueueData
from tests.support.wire import make_job

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
MAX_BATCHED_TOKENS = 8192
MAX_PREFILL_CHUNK = 512


class VirtualWorker:
    """A queue and a worker, step by step."""

    def __init__(self, args: argparse.Namespace, by_turns: bool):
        self._args = args
        self._by_turns = by_turns
        self._queue = QueueData()
        self._attempts: dict[str, int] = {}
        self._tenants: dict[str, str] = {}
        self._received: set[str] = set()
        self._number = 0
        kv = KVManager(args.blocks, BLOCK_SIZE)
        limits = Limits(
            max_num_seqs=args.slots,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_prefill_chunk=MAX_PREFILL_CHUNK,
            max_model_len=MAX_MODEL_LEN,
        )
        self.engine = Engine(IdleExecutor(), Scheduler(kv, limits), frozenset())
        self._slots = SlotCapacity(args.slots, args.blocks * BLOCK_SIZE)
        self.num_waiting = {"flooder": 0}

    def submit(self, tenant: str, num_prompt_tokens: int, num_tokens: int) -> str:
        """Submit a job and return its id. Without fairness all jobs are of one tenant, in order of arrival."""
        self._number += 1
        job_id = f"{self._number:08}"
        self._tenants[job_id] = tenant
        self.num_waiting[tenant] = self.num_waiting.get(tenant, 0) + 1
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        prompt = np.full(num_prompt_tokens, 1, np.uint32).tobytes()
        owner = tenant if self._by_turns else "all"
        self._queue.submit(make_job(job_id, tenant=owner, prompt=prompt, sampling=sampling), UNBOUNDED)
        return job_id

    def step(self, now_s: float) -> Iterator[str]:
        """Claim jobs for free slots and run a step; yield the jobs that got their first token."""
        max_branches, budget = self._slots.claim_budget(self.engine.num_free_tokens, now_s)
        for claim in self._queue.claim("worker", max_branches, budget):
            job = claim.job
            self._attempts[job.job_id] = claim.attempt
            self.num_waiting[self._tenants[job.job_id]] -= 1
            self._slots.add_job(job, 0, now_s)
            prompt = tuple(np.frombuffer(job.prompt, np.uint32).tolist())
            self.engine.add_request(
                EngineRequest(request_id=job.job_id, prompt=prompt, sampling=job.sampling, tenant=job.tenant)
            )
        if self.engine.has_work:
            self.engine.step()
        for output in self.engine.drain_request_outputs():
            job_id = output.request_id
            if job_id not in self._received:
                self._received.add(job_id)
                self._slots.mark_started(job_id)
                yield job_id
            if output.end is not None:
                usage = Usage(prompt_tokens=output.num_prompt_tokens, completion_tokens=output.num_output_tokens)
                last = Event(job_id=job_id, number=1, end=output.end, usage=usage)
                self._queue.write(last, "worker", self._attempts.pop(job_id))
                self._slots.remove_job(job_id, now_s)


def simulate(args: argparse.Namespace, num_small: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for order in ("by_turns", "by_arrival"):
        first_ms = {}
        for beside in (False, True):
            first_ms[beside], worker = _first_tokens(args, num_small, order == "by_turns", beside)
        found[f"{order}_preemptions_beside"] = worker.engine.stats().num_preemptions
        for share in (50, 99):
            alone, beside = (float(np.percentile(first_ms[is_beside], share)) for is_beside in (False, True))
            name = f"{order}_ttft_ms_p{share}_alone_beside_ratio"
            found[name] = [round(alone, 1), round(beside, 1), round(beside / alone, 2)]
    return {
        **found,
        "small_tenants": num_small,
        "requests": len(first_ms[True]),
        "flooder_keeps_waiting": args.flood,
        "flood_begins_before_s": args.head_start_s,
        "tokens_of_small_and_flood": [args.tokens, args.flood_tokens or args.tokens],
        "prompt_tokens_of_small_and_flood": [args.prompt, args.flood_prompt or args.prompt],
        "slots": args.slots,
        "blocks": args.blocks,
        "step_ms": args.step_ms,
    }


def _first_tokens(
    args: argparse.Namespace, num_small: int, by_turns: bool, with_flooder: bool
) -> tuple[list[float], VirtualWorker]:
    """Return the small tenants' TTFTs in ms, from their first request on."""
    chance, worker = random.Random(7), VirtualWorker(args, by_turns)
    flood_chance = random.Random(8)  # separate, so that the small tenants ask the same with and without a flood
    asked_ms: dict[str, float] = {}
    first_ms: list[float] = []
    now_ms, next_ms = 0.0, 1000 * args.head_start_s
    while now_ms < 1000 * (args.head_start_s + args.seconds):
        while next_ms <= now_ms:
            tenant = f"small{chance.randrange(num_small)}"
            asked_ms[worker.submit(tenant, args.prompt, around(chance, args.tokens))] = next_ms
            next_ms += chance.expovariate(args.rate * num_small / 1000)
        for _ in range(args.flood - worker.num_waiting["flooder"] if with_flooder else 0):
            length = around(flood_chance, args.flood_tokens or args.tokens)
            worker.submit("flooder", args.flood_prompt or args.prompt, length)
        now_ms += args.step_ms
        first_ms += [now_ms - asked_ms.pop(job_id) for job_id in worker.step(now_ms / 1000) if job_id in asked_ms]
    return first_ms + [now_ms - at_ms for at_ms in asked_ms.values()], worker  # waiting: a lower bound


def around(chance: random.Random, num_tokens: int) -> int:
    """Lengths differ, as a model's do; else all slots would become free together."""
    return chance.randrange(num_tokens // 2, 3 * num_tokens // 2 + 1)

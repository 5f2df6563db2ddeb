"""A worker without its process: job loop and engine thread wired as in the process, with a scripted model."""

from __future__ import annotations

import asyncio
import itertools
import time

from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from service.observability.tracing import NO_TRACING
from service.queue.codec import pack_ids, unpack_ids
from service.queue.messages import Job, WorkerCard
from service.worker.capacity import SlotCapacity
from service.worker.engine_thread import EngineThread, Stop
from service.worker.job_loop import EngineSizes, JobLoop, OutputInbox
from tests.fakes.scripted_executor import ScriptedExecutor, next_token

VOCAB = 97
NUM_SLOTS = 4
NUMBERS = itertools.count()


class WorkerHarness:
    """Worker that serves jobs inside `async with`. `dead` has what ended the engine."""

    def __init__(self, queue, step_s=0.0, executor=None, name="w", tracing=NO_TRACING):
        self.queue, self.name = queue, name
        limits = Limits(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=32, max_prefill_chunk=32, max_model_len=4000)
        executor = executor or ScriptedExecutor(1024, 4, step_s=step_s)
        self.dead = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        engine = Engine(executor, Scheduler(KVManager(1024, 4), limits), frozenset())
        inbox = OutputInbox()
        self.engine = EngineThread(
            engine, inbox.on_outputs, lambda error: loop.call_soon_threadsafe(self.dead.set_result, error)
        )
        sizes = EngineSizes(VOCAB, NUM_SLOTS, 1024 * 4)
        self.job_loop = JobLoop(queue, self.engine, inbox, self.card, sizes, tracing)

    def card(self, ready):
        return WorkerCard(
            worker_id=self.name,
            model="m",
            ready=ready,
            max_model_len=4000,
            num_blocks=1024,
            block_size=4,
            beat_at_s=0.0,
        )

    async def __aenter__(self):
        self.engine.start()
        self.duties = asyncio.create_task(self.job_loop.run())
        return self

    async def __aexit__(self, *_):
        self.engine.send(Stop(EndReason.SHUTDOWN))
        self.duties.cancel()
        await asyncio.wait({self.duties})
        self.engine.join(10)

    def claims_nothing(self):
        self.job_loop._slots = SlotCapacity(-NUM_SLOTS, 0)

    def claims_again(self):
        self.job_loop._slots = SlotCapacity(NUM_SLOTS, 1024 * 4)

    async def die(self):
        """Stop at once, as by SIGKILL; the lease stays."""
        self.duties.cancel()
        await asyncio.wait({self.duties})

    async def retire(self):
        """Stop like a process that ends by itself: the lease ends too."""
        await self.die()
        await self.queue.retire(self.name)

    async def submit(self, prompt, deadline_s=None, model=None, tenant="t", **params):
        """Submit a job; return its id and an iterator of its events."""
        job_id = f"JOB{next(NUMBERS)}"
        events = self.queue.follow(job_id)
        sampling = SamplingParams(**{"max_tokens": 5} | params)
        await self.queue.submit(
            Job(
                job_id=job_id, tenant=tenant, prompt=pack_ids(prompt), sampling=sampling, submitted_at_s=time.time(),
                deadline_s=deadline_s, feed="f", model=model,
            )
        )  # fmt: skip
        return job_id, events


async def read_events(events, heard=(), within_s=10):
    """Return (tokens, end, usage) of a followed job, given its earlier events; numbers must run without gap."""
    heard = list(heard)
    async with asyncio.timeout(within_s):
        async for event in events:
            heard.append(event)
    assert [event.number for event in heard] == list(range(1, len(heard) + 1))
    tokens = [token for event in heard for part in event.parts for token in unpack_ids(part.tokens)]
    return tokens, heard[-1].end, heard[-1].usage


def alone(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]

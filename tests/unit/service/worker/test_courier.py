"""The courier between a broker in memory and an engine on a scripted model."""

import asyncio
import itertools
import time

import pytest

from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.kv_manager import KVManager
from service.engine.scheduler import Limits
from service.errors import EndReason
from service.wire.broker import BrokerUnavailable
from service.wire.codec import pack_ids, unpack_ids
from service.wire.memory_broker import MemoryBroker
from service.wire.messages import Cancel, Job, WorkerCard
from service.worker.courier import Courier
from service.worker.engine_thread import EngineThread, Stop
from tests.support.scripted_executor import ScriptedExecutor, next_token

VOCAB = 97
NUMBERS = itertools.count()


class House:
    """A broker, a courier and an engine thread, wired as the worker process wires them."""

    def __init__(self, broker, step_s=0.0):
        self.broker = broker
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_prefill_chunk=32, max_model_len=4000)
        engine = Engine(ScriptedExecutor(1024, 4, step_s=step_s), KVManager(1024, 4), limits, frozenset())
        self.courier = Courier(broker, self.card, VOCAB, max_open=8)
        self.engine = EngineThread(engine, self.courier.deliver, lambda error: None)
        self.courier.engine = self.engine

    def card(self, ready):
        return WorkerCard(
            worker_id="w", model="m", ready=ready, max_model_len=4000, num_blocks=1024, block_size=4, beat_at_s=0.0
        )

    async def __aenter__(self):
        self.engine.start()
        self.duties = asyncio.create_task(self.courier.run())
        return self

    async def __aexit__(self, *_):
        self.engine.send(Stop(EndReason.SHUTDOWN))
        self.duties.cancel()
        await asyncio.wait({self.duties})
        self.engine.join(10)

    async def submit(self, prompt, deadline_s=None, **wishes):
        """Submit a job and follow it; (id, iterator of its events)."""
        job_id = f"JOB{next(NUMBERS)}"
        events = self.broker.follow(job_id)
        sampling = SamplingParams(**{"max_tokens": 5} | wishes)
        await self.broker.submit(
            Job(
                job_id=job_id, tenant="t", prompt=pack_ids(prompt), sampling=sampling, submitted_at_s=time.time(),
                deadline_s=deadline_s, feed="f",
            )
        )  # fmt: skip
        return job_id, events


async def told(events):
    """(tokens, end, usage) of a followed job; event numbers run without gap."""
    tokens, number = [], 0
    async with asyncio.timeout(10):
        async for event in events:
            number += 1
            assert event.number == number
            tokens += [token for part in event.parts for token in unpack_ids(part.tokens)]
            last = event
    return tokens, last.end, last.usage


def alone(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def test_jobs_come_back_as_events():
    async with House(MemoryBroker()) as house:
        jobs = [await house.submit([n, 1], max_tokens=3 + n) for n in range(12)]
        for n, (_, events) in enumerate(jobs):
            tokens, end, usage = await told(events)
            assert (tokens, end) == (alone([n, 1], 3 + n), EndReason.LENGTH)
            assert (usage.prompt_tokens, usage.completion_tokens) == (2, 3 + n)
        assert house.courier.num_open == 0


async def test_an_id_outside_the_vocabulary_is_refused_by_the_worker_too():
    async with House(MemoryBroker()) as house:
        _, events = await house.submit([1, VOCAB])
        assert (await told(events))[:2] == ([], EndReason.INVALID)


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.STOP])
async def test_a_cancel_ends_the_job_with_its_reason(reason):
    async with House(MemoryBroker(), step_s=0.01) as house:
        job_id, events = await house.submit([1], max_tokens=3900)
        await house.broker.cancel(Cancel(job_id=job_id, reason=reason))
        tokens, end, _ = await told(events)
        assert end is reason
        assert tokens == alone([1], len(tokens))


async def test_a_cancel_of_one_branch_leaves_the_others():
    async with House(MemoryBroker(), step_s=0.01) as house:
        job_id, events = await house.submit([1], max_tokens=40, n=2, best_of=2)
        first = await anext(events)  # it runs
        await house.broker.cancel(Cancel(job_id=job_id, reason=EndReason.STOP, branch=0))
        async with asyncio.timeout(10):
            parts = [*first.parts, *[part async for event in events for part in event.parts]]
        ends = {part.branch: part.end for part in parts if part.end is not None}
        assert ends == {0: EndReason.STOP, 1: EndReason.LENGTH}
        assert sum(len(unpack_ids(part.tokens)) for part in parts if part.branch == 1) == 40


async def test_a_deadline_ends_a_running_job():
    async with House(MemoryBroker(), step_s=0.01) as house:
        _, events = await house.submit([1], deadline_s=time.time() + 0.2, max_tokens=3900)
        tokens, end, _ = await told(events)
        assert end is EndReason.DEADLINE
        assert tokens == alone([1], len(tokens))


class AbsentBroker(MemoryBroker):
    """Refuses every third write."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    async def publish(self, events):
        if next(self.calls) % 3 == 0:
            raise BrokerUnavailable("away")
        await super().publish(events)


async def test_no_event_is_lost_while_the_queue_is_away():
    async with House(AbsentBroker()) as house:
        jobs = [await house.submit([n], max_tokens=20) for n in range(6)]
        for n, (_, events) in enumerate(jobs):
            assert (await told(events))[0] == alone([n], 20)


async def test_a_drained_courier_claims_nothing_more():
    async with House(MemoryBroker()) as house:
        _, first = await house.submit([1], max_tokens=200)
        await asyncio.sleep(0.05)
        await house.courier.drain(timeout_s=10)
        assert (await told(first))[1] is EndReason.LENGTH
        await house.submit([2])
        await asyncio.sleep(0.1)
        assert await house.broker.num_waiting() == 1
        assert house.courier.num_open == 0

"""Workers that die, hang or leave: whichever worker resumes their requests, clients see one answer."""

import asyncio
import time

import pytest

from service.engine.request import BranchHistory
from service.errors import EndReason
from service.queue.codec import pack_floats, pack_ids
from service.queue.interface import SUSPECT_AFTER_DEATHS
from service.queue.messages import Cancel, Event, Part, TokenLogprobs
from service.worker.recovery import branch_histories
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.scripted_executor import ScriptedExecutor
from tests.support.queue_pair import memory_pair
from tests.support.worker_harness import WorkerHarness, alone, read_events

LEASE_S = 0.4
POISON = 91


@pytest.fixture
def data():
    return QueueData()


def join(data, **options):
    return WorkerHarness(memory_pair(data, lease_s=LEASE_S), **options)


def received_by(stat, *workers):
    return [worker.job_loop._card().stats[stat] for worker in workers]


async def test_another_worker_goes_on_where_a_dead_one_stopped(data):
    async with join(data, step_s=0.005, name="first") as first, join(data, name="second") as second:
        second.job_loop._draining = True  # it looks for the dead, and takes no job yet
        jobs = [await first.submit([n, 1], max_tokens=60) for n in range(4)]
        for _, events in jobs:
            await anext(events)
        await first.die()
        second.job_loop._draining = False
        second.duties.cancel()
        second.duties = asyncio.create_task(second.job_loop.run())
        killed_s = time.monotonic()
        for n, (job_id, _) in enumerate(jobs):
            tokens, end, usage = await read_events(second.queue.follow(job_id))
            assert (tokens, end) == (alone([n, 1], 60), EndReason.LENGTH)
            assert usage.completion_tokens == 60
        assert time.monotonic() - killed_s < 3 * LEASE_S + 2.0
        assert received_by("resumed_total", first, second) == [0, 4]
        assert received_by("jobs_taken_over_total", first, second) == [0, 4]
        assert received_by("jobs_lost_total", second) == received_by("num_jobs_held", second) == [0]


@pytest.mark.parametrize("num_jobs", [2, 6])
async def test_a_worker_that_leaves_hands_its_jobs_to_one_that_is_ready(data, caplog, num_jobs):
    caplog.set_level("INFO", "quire.job_loop")
    async with join(data, step_s=0.01, name="old") as old, join(data, name="new") as new:
        new.claims_nothing()
        jobs = [await old.submit([n], max_tokens=400) for n in range(num_jobs)]
        for _, events in jobs[:4]:
            await anext(events)
        new.claims_again()
        started_s = time.monotonic()
        await old.job_loop.drain(10, asyncio.Event())
        await old.job_loop.wait_idle()
        assert time.monotonic() - started_s < 3.0
        for n, (job_id, _) in enumerate(jobs):
            tokens, end, _ = await read_events(new.queue.follow(job_id))
            assert (tokens, end) == (alone([n], 400), EndReason.LENGTH)
    assert "attempt=2" in caplog.text
    assert "attempt=3" not in caplog.text, "the leaving worker claimed what it had returned"


@pytest.mark.parametrize(("timeout_s", "is_at_once"), [(0.2, False), (1000.0, True)])
async def test_what_is_left_after_the_drain_waits_for_the_next_worker(data, timeout_s, is_at_once):
    at_once = asyncio.Event()
    async with join(data, step_s=0.01) as old:
        job_id, events = await old.submit([3], max_tokens=100)
        await anext(events)
        if is_at_once:
            asyncio.get_running_loop().call_soon(at_once.set)
        await old.job_loop.drain(timeout_s, at_once)
        await old.job_loop.wait_idle()
        assert (await old.queue.queue_state()).num_waiting == 1
    async with join(data) as new:
        assert (await read_events(new.queue.follow(job_id)))[:2] == (alone([3], 100), EndReason.LENGTH)


async def test_who_lost_its_jobs_stops_computing_them(data):
    """It sends no heartbeat until its lease has expired, then continues."""
    async with join(data, step_s=0.005, name="zombie") as zombie, join(data, name="successor") as successor:
        successor.claims_nothing()
        job_id, events = await zombie.submit([5], max_tokens=500)
        await anext(events)
        assert received_by("num_jobs_held", zombie) == [1]
        zombie.queue.renew = zombie.queue.take_over = asyncio.Event().wait
        successor.claims_again()
        async with asyncio.timeout(60):
            while zombie.job_loop.num_open:
                await asyncio.sleep(0.02)
            while zombie.engine.stats.num_running:
                await asyncio.sleep(0.02)
        assert (await read_events(successor.queue.follow(job_id)))[:2] == (alone([5], 500), EndReason.LENGTH)
        (num_lost, none), (num_found,) = (
            received_by("jobs_lost_total", zombie, successor),
            received_by("jobs_taken_over_total", successor),
        )
        assert 1 <= num_lost <= num_found, "it may claim what it has lost, and lose it again"
        assert none == 0
        assert received_by("num_jobs_held", zombie) == [0]


async def test_an_engine_that_hangs_loses_its_jobs(data):
    async with join(data, step_s=0.005, name="hung") as hung, join(data, name="successor") as successor:
        successor.claims_nothing()
        job_id, events = await hung.submit([5], max_tokens=200)
        await anext(events)
        hung.job_loop._engine = _Silent(hung.engine)
        successor.claims_again()
        assert (await read_events(successor.queue.follow(job_id)))[:2] == (alone([5], 200), EndReason.LENGTH)
        async with asyncio.timeout(60):
            while hung.job_loop.num_open:
                await asyncio.sleep(0.02)


class _Silent:
    """An engine thread that has not come round for a minute."""

    silent_s = 60.0

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)


class DyingExecutor(ScriptedExecutor):
    """Dies of every step that computes the poisonous token."""

    def launch(self, plan):
        for chunk in plan.chunks:
            if POISON in chunk.sequence.request.prompt and chunk.start > 0:
                raise RuntimeError("device lost")
        return super().launch(plan)


async def serve_with_many_lives(data, is_over):
    """Worker after worker, as a supervisor would start them; how many engines died."""
    num_deaths = 0
    while True:
        async with join(data, executor=DyingExecutor(1024, 4, step_s=0.001), name=f"w{num_deaths}") as worker:
            over = asyncio.create_task(is_over.wait())
            await asyncio.wait([over, worker.dead], return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            if not worker.dead.done():
                return num_deaths
            num_deaths += 1
            await worker.job_loop.abandon(worker.engine.in_flight, str(worker.dead.result()))
            assert worker.job_loop.num_open == 0
            await worker.retire()


async def test_a_job_that_kills_engines_is_buried_and_all_others_complete(data):
    is_over = asyncio.Event()
    supervisor = asyncio.create_task(serve_with_many_lives(data, is_over))
    gateway = WorkerHarness(memory_pair(data))
    jobs = [await gateway.submit([n, 1], max_tokens=40) for n in range(10)]
    _, poisoned = await gateway.submit([POISON, 2], max_tokens=40)
    jobs += [await gateway.submit([n, 1], max_tokens=40) for n in range(10, 20)]
    for n, (_, events) in enumerate(jobs):
        assert (await read_events(events))[:2] == (alone([n, 1], 40), EndReason.LENGTH)
    assert (await read_events(poisoned))[1] is EndReason.POISONED
    is_over.set()
    assert await supervisor == 3
    ((job, cause),) = data.dead
    assert (job.prompt, cause) == (pack_ids([POISON, 2]), "device lost")


async def test_suspects_are_tried_one_by_one_and_the_innocent_go_on_together(data):
    gateway = memory_pair(data)
    async with join(data, step_s=0.005) as worker:
        worker.duties.cancel()
        jobs = [await worker.submit([n], max_tokens=100) for n in range(3)]
        for _ in range(SUSPECT_AFTER_DEATHS):
            await gateway.fetch(4, 0.0)
            await gateway.hand_back([job_id for job_id, _ in jobs], "a job was to blame")
        tried, fetch_suspect = [], worker.queue.fetch_suspect

        async def fetch_and_note():
            suspect = await fetch_suspect()
            tried.append((suspect and suspect.job.job_id, worker.job_loop.num_open))
            return suspect

        worker.queue.fetch_suspect = fetch_and_note
        worker.duties = asyncio.create_task(worker.job_loop.run())
        async with asyncio.timeout(10):
            while worker.engine.stats.num_running < len(jobs):
                await asyncio.sleep(0.005)
        # Whether it looks once more, and finds none, depends on when the next heartbeat says that none is left.
        assert [each for each in tried if each != (None, 0)] == [(job_id, 0) for job_id, _ in jobs]
        for n, (_, events) in enumerate(jobs):
            assert (await read_events(events))[:2] == (alone([n], 100), EndReason.LENGTH)


async def test_a_cancel_heard_between_claim_and_start_counts(data):
    async with join(data, step_s=0.01) as worker:
        fetch, was_claimed = worker.queue.fetch, asyncio.Event()

        async def fetch_and_wait(*args):
            claims = await fetch(*args)
            if claims:
                was_claimed.set()
                await asyncio.sleep(0.2)
            return claims

        worker.queue.fetch = fetch_and_wait
        await asyncio.sleep(0.7)  # a fetch of the old kind may still be waiting
        job_id, events = await worker.submit([1], max_tokens=3900)
        await was_claimed.wait()
        await worker.queue.cancel(Cancel(job_id=job_id, reason=EndReason.CANCELLED))
        assert (await read_events(events))[1] is EndReason.CANCELLED


def test_the_past_of_each_branch_is_what_was_reported_of_it():
    def part(branch, ids, logprobs=None, end=None):
        packed = None
        if logprobs is not None:
            packed = TokenLogprobs(chosen=pack_floats(logprobs), top_ids=b"", top=b"")
        return Part(branch=branch, tokens=pack_ids(ids), logprobs=packed, end=end)

    events = [
        Event(job_id="J", number=1, parts=(part(0, [1, 2], [-0.5, -0.25]), part(2, [3], [-1.0]))),
        Event(job_id="J", number=2, parts=(part(2, [4], [-2.0], EndReason.STOP), part(0, [5], [-0.125]))),
    ]
    assert branch_histories(events) == (
        BranchHistory(token_ids=(1, 2, 5), sum_logprob=-0.875),
        BranchHistory(),
        BranchHistory(token_ids=(3, 4), end=EndReason.STOP, sum_logprob=-3.0),
    )
    assert branch_histories([]) == ()

"""Redis killed, emptied, full, slow or cut off under running requests: none hangs or repeats an event."""

from __future__ import annotations

import asyncio
import time

import pytest

from service.errors import EndReason
from service.queue import keys
from service.queue.interface import QueueUnavailable
from tests.support.figures import note
from tests.support.fleet import Fleet
from tests.support.history import JobClient, check_jobs, check_logs, until_received

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

WISHES = (
    {"temperature": 0.0, "max_tokens": 120},
    {"temperature": 1.0, "seed": 7, "max_tokens": 120, "logprobs": 2},
    {"temperature": 1.0, "seed": 9, "n": 3, "best_of": 4, "max_tokens": 80},
)


async def run_some(client: JobClient, rounds: int = 2) -> None:
    for round_ in range(rounds):
        for number, options in enumerate(WISHES):
            prompt = tuple(range(20 + number + 5 * round_, 40 + 3 * number + 5 * round_))
            await client.submit(prompt, ignore_eos=True, **options)


@pytest.fixture
async def running(fleet):
    """Run two workers and a gateway, with started jobs."""
    await fleet.have(2)
    gateway = await fleet.gateway()
    client = JobClient(gateway)
    await run_some(client)
    for followed in client.jobs:
        await until_received(followed, 3)
    yield client
    await gateway.close()


async def finish(fleet, client, goldens) -> None:
    jobs = await client.over(120)
    check_jobs(jobs, goldens)
    with fleet.client() as redis:
        check_logs(redis, jobs)


async def test_killed_and_back_with_its_data(fleet, running, goldens):
    await asyncio.sleep(1.1)  # everysec: earlier writes are on disk
    fleet.kill_redis()
    await asyncio.sleep(0.5)
    fleet.start_redis()
    back_s = time.monotonic()
    await running.over(120)
    note("Redis killed, back: last answer complete after", f"{time.monotonic() - back_s:.1f} s")
    await finish(fleet, running, goldens)


async def test_killed_at_once_again_and_again(fleet, running, goldens):
    """Up to a second of writes is lost each time: workers write it again."""
    for _ in range(3):
        await asyncio.sleep(0.3)
        fleet.kill_redis()
        fleet.start_redis()
    await finish(fleet, running, goldens)


async def test_back_without_its_data(fleet, running, goldens):
    waiting = JobClient(running._gateway)
    with fleet.client() as redis:
        redis.flushall()
    await run_some(waiting, rounds=1)
    check_jobs(await waiting.over(), goldens)
    await finish(fleet, running, goldens)


async def test_out_of_memory_for_a_while(fleet, running, goldens):
    with fleet.client() as redis:
        redis.config_set("maxmemory", 1)
        with pytest.raises(QueueUnavailable):
            await JobClient(running._gateway).submit((20, 21), max_tokens=4)
        await asyncio.sleep(fleet.lease_s * 1.5)
        redis.config_set("maxmemory", 0)
    await finish(fleet, running, goldens)


async def test_read_only_for_a_while(fleet, running, goldens):
    with fleet.client() as redis:
        redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        await asyncio.sleep(1.0)
        with pytest.raises(QueueUnavailable):
            await JobClient(running._gateway).submit((20, 21), max_tokens=4)
        redis.execute_command("REPLICAOF", "NO", "ONE")
    await finish(fleet, running, goldens)


async def test_two_seconds_late(fleet, running, goldens):
    with fleet.client() as redis:
        for _ in range(3):
            redis.client_pause(2000)
            await asyncio.sleep(2.5)
    await finish(fleet, running, goldens)


async def test_connections_cut_again_and_again(fleet, running, goldens):
    over = asyncio.create_task(running.over(120))
    num_cuts = 0
    with fleet.client() as redis:
        while not over.done():
            redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            num_cuts += 1
            await asyncio.sleep(0.2)
    await finish(fleet, running, goldens)
    note("all connections cut", f"{num_cuts} times under {len(running.jobs)} jobs")


async def test_emptied_while_no_worker_is_there(tmp_path, goldens, monkeypatch):
    """Jobs that cannot be restored end with LOST; jobs that were only queued are submitted again."""
    monkeypatch.setattr("service.queue.redis.follower.LOST_AFTER_S", 3.0)
    fleet = Fleet(tmp_path)
    try:
        (worker,) = await fleet.have(1, step_s=0.05)
        gateway = await fleet.gateway()
        begun, queued = JobClient(gateway), JobClient(gateway)
        followed = await begun.submit((20, 21, 22), max_tokens=500, ignore_eos=True)
        await until_received(followed, 3)
        worker.end(9)
        await run_some(queued, rounds=1)
        with fleet.client() as redis:
            redis.flushall()
        await begun.over(60)
        assert followed.answer().end is EndReason.LOST
        await fleet.have(1)
        check_jobs(await queued.over(), goldens)
        await gateway.close()
    finally:
        fleet.close()


async def test_a_redis_that_was_away_for_longer_than_a_lease_makes_no_orphans(fleet, running, goldens):
    fleet.kill_redis()
    await asyncio.sleep(fleet.lease_s * 2)
    fleet.start_redis()
    await finish(fleet, running, goldens)
    with fleet.client() as redis:
        assert redis.xlen(keys.DEAD) == 0

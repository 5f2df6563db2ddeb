"""Every fault of the list, repeatedly, with each answer compared with the undisturbed one."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from contextlib import closing

import pytest

from model.text.grammar import regex_grammar
from service.errors import EndReason
from service.queue import keys
from service.queue.messages import Cancel
from tests.support.chaos_worker import POISON
from tests.support.figures import note, note_percentiles
from tests.support.fleet import Fleet
from tests.support.history import JobClient, check_jobs, check_logs, until_received

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3000)]

NUM_JOBS = int(os.environ.get("CHAOS_JOBS", "1000"))
LONG = (
    {"temperature": 0.0, "max_tokens": 80},
    {"temperature": 1.0, "seed": 7, "max_tokens": 80, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "max_tokens": 80, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 9, "n": 4, "best_of": 4, "max_tokens": 60},
    {"temperature": 1.0, "seed": 10, "n": 2, "best_of": 4, "max_tokens": 60, "logprobs": 0},
    {"temperature": 0.0, "max_tokens": 80, "repetition_penalty": 1.2},
    {
        "temperature": 1.0,
        "seed": 11,
        "grammar": regex_grammar("[a-z ]{150,200}"),
        "max_tokens": 80,
        "n": 2,
        "best_of": 2,
    },
    {"temperature": 0.0, "max_tokens": 60, "prompt_logprobs": 2, "logprobs": 1},
)


async def run_long(client: JobClient, first: int = 0) -> None:
    for number, options in enumerate(LONG):
        await client.submit(tuple(range(20 + first + number, 40 + first + 3 * number)), ignore_eos=True, **options)


async def finish(fleet, gateway, client, goldens) -> None:
    jobs = await client.over(600)
    check_jobs(jobs, goldens)
    with fleet.client() as redis:
        check_logs(redis, jobs)
    await gateway.close()


RECOVERED_S: list[float] = []


@pytest.mark.parametrize("round_", range(3))
@pytest.mark.parametrize("fault", ["claim", "prefill", "token-2", "token-20", "settle"])
async def test_killed_where_it_hurts(fleet, goldens, fault, round_):
    await fleet.have(2)
    gateway = await fleet.gateway()
    client = JobClient(gateway)
    fleet.order(fault)
    await run_long(client, first=round_)
    killed_s = await fleet.obeyed(fault)
    await finish(fleet, gateway, client, goldens)
    silent = [followed for followed in client.jobs if followed.seen_at_s[-1] > killed_s]
    RECOVERED_S.extend(followed.first_seen_after(killed_s) for followed in silent)
    note_percentiles(f"SIGKILL to the next event, lease {fleet.lease_s:g} s, by job", RECOVERED_S)


async def test_with_the_lease_of_a_service_the_next_token_comes_in_time(tmp_path, goldens):
    fleet = Fleet(tmp_path, lease_s=10.0)
    try:
        waits_s = []
        for number in range(3):
            await fleet.have(2)
            gateway = await fleet.gateway()
            client = JobClient(gateway)
            await run_long(client, first=number)
            for followed in client.jobs:
                await until_received(followed, 3)
            fleet.living[0].end(signal.SIGKILL)
            killed_s = time.monotonic()
            await finish(fleet, gateway, client, goldens)
            waits_s += [max(_gaps_over(followed, killed_s)) for followed in client.jobs]
        note_percentiles("SIGKILL, lease 10 s: longest wait for an event, by job", waits_s)
        assert max(waits_s) < 12.0
    finally:
        fleet.close()


def _gaps_over(followed, moment_s: float) -> list[float]:
    """Return the waits between events that end after the moment."""
    times = [moment_s, *(seen_s for seen_s in followed.seen_at_s if seen_s > moment_s)]
    return [later - earlier for earlier, later in itertools.pairwise(times)] or [0.0]


async def test_leaving_under_load_again_and_again(fleet, goldens):
    """A rolling restart: a new worker is ready before an old one gets SIGTERM."""
    await fleet.have(2)
    gateway = await fleet.gateway()
    waits_s, statuses = [], []
    for round_ in range(4):
        await fleet.have(2)
        leaver = fleet.living[0]
        client = JobClient(gateway)
        await run_long(client, first=round_)
        for followed in client.jobs:
            await until_received(followed, 3)
        left_s = time.monotonic()
        leaver.send(signal.SIGTERM)
        jobs = await client.over()
        check_jobs(jobs, goldens)
        statuses.append(await asyncio.to_thread(leaver.end))
        waits_s += [max(_gaps_over(followed, left_s)) for followed in jobs]
    note_percentiles("SIGTERM under load: longest wait for an event, by job", waits_s)
    assert statuses == [0] * 4
    await gateway.close()


async def test_stopped_past_its_lease_and_woken(fleet, goldens):
    await fleet.have(2)
    gateway = await fleet.gateway()
    for round_ in range(3):
        client = JobClient(gateway)
        await run_long(client, first=round_)
        for followed in client.jobs:
            await until_received(followed, 2)
        sleeper = fleet.living[round_ % 2]
        sleeper.send(signal.SIGSTOP)
        await asyncio.sleep(fleet.lease_s * (0.5 + 0.75 * round_))
        sleeper.send(signal.SIGCONT)
        await asyncio.sleep(0.5)
        sleeper.send(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        sleeper.send(signal.SIGCONT)
        check_jobs(await client.over(), goldens)
        with fleet.client() as redis:
            check_logs(redis, client.jobs)
    await gateway.close()


async def test_a_poison_job_kills_three_engines_and_all_others_complete(tmp_path, goldens):
    with closing(Fleet(tmp_path)) as fleet:  # no engine has just died of another cause
        await _poison(fleet, goldens)


async def _poison(fleet, goldens):
    async with fleet.kept(2):
        num_dead = fleet.num_dead
        gateway = await fleet.gateway()
        client, poisoner = JobClient(gateway), JobClient(gateway)
        await run_long(client)
        poisoned = await poisoner.submit((*POISON, 5), temperature=0.0, max_tokens=20)
        await run_long(client, first=9)
        await poisoner.over(600)
        await finish(fleet, gateway, client, goldens)
        assert poisoned.answer().end is EndReason.POISONED
        num_deaths = fleet.num_dead - num_dead
        note("engine deaths by one poison job", f"{num_deaths}, all {len(client.jobs)} other jobs complete")
        assert num_deaths == 3
    with fleet.client() as redis:
        assert redis.xlen(keys.DEAD) == 1


async def test_cancels_at_any_moment_leave_nothing(fleet):
    await fleet.have(2)
    gateway = await fleet.gateway()
    client, dice = JobClient(gateway), random.Random(5)
    reasons = (EndReason.CANCELLED, EndReason.STOP)

    async def leave(followed) -> None:
        await asyncio.sleep(dice.expovariate(2.0))
        await gateway.cancel(Cancel(job_id=followed.job.job_id, reason=dice.choice(reasons)))

    leaving = []
    for number in range(min(NUM_JOBS, 400)):
        prompt = tuple(range(20 + number % 30, 60 + number % 30))
        leaving.append(asyncio.create_task(leave(await client.submit(prompt, max_tokens=100, ignore_eos=True))))
        await asyncio.sleep(0.005)
    await asyncio.gather(*leaving)
    jobs = await client.over(600)
    ends = [followed.answer().end for followed in jobs]
    assert set(ends) <= {*reasons, EndReason.LENGTH}
    with fleet.client() as redis:
        check_logs(redis, jobs)
    async with asyncio.timeout(20):
        while any(card.stats["num_blocks_used"] or card.stats["num_running"] for card in await gateway.workers()):
            await asyncio.sleep(0.2)
    note("random cancels", f"{sum(end is not EndReason.LENGTH for end in ends)} of {len(ends)}, 0 blocks left")
    await gateway.close()


async def test_a_storm_of_kills_loses_nothing(tmp_path, goldens):
    """Many short jobs; every few seconds a random worker is killed while another one is alive."""
    fleet, dice = Fleet(tmp_path, flags=("--max-num-seqs=16",)), random.Random(11)
    try:
        async with fleet.kept(3, step_s=0.0):
            gateway = await fleet.gateway()
            client = JobClient(gateway)
            storm = asyncio.create_task(_storm(fleet, dice))
            started_s = time.monotonic()
            for number in range(NUM_JOBS):
                prompt, options = _short(number)
                await client.submit(prompt, **options)
                while sum(1 for followed in client.jobs[-400:] if not followed.events) > 200:
                    await asyncio.sleep(0.02)
            jobs = await client.over(2400)
            took_s = time.monotonic() - started_s
            storm.cancel()
            await asyncio.wait({storm})
        poisoned = [followed for followed in jobs if followed.events[-1].end is EndReason.POISONED]
        check_jobs([followed for followed in jobs if followed not in poisoned], goldens)
        with fleet.client() as redis:
            check_logs(redis, jobs)
        note(
            "storm of SIGKILLs",
            f"{len(jobs)} jobs, {sum(followed.num_tokens for followed in jobs)} tokens in {took_s:.0f} s, "
            f"{fleet.num_dead} workers killed: 0 lost, 0 duplicated, 0 gaps, {len(poisoned)} given up as poison",
        )
        assert not poisoned
        await gateway.close()
    finally:
        fleet.close()


async def _storm(fleet, dice: random.Random) -> None:
    while True:
        await asyncio.sleep(dice.uniform(2.0, 5.0))
        ready = [worker for worker in fleet.living if worker.is_ready]
        if len(ready) > 1:
            dice.choice(ready).send(signal.SIGKILL)


def _short(number: int) -> tuple[tuple[int, ...], dict]:
    """Return prompt and parameters of one of sixty kinds."""
    kind = number % 60
    options = {"temperature": (0.0, 1.0, 0.7)[kind % 3], "seed": kind, "max_tokens": 4 + kind % 13, "ignore_eos": True}
    if kind % 10 == 9:
        options |= {"n": 2, "best_of": 2, "logprobs": 1}
    return tuple(range(30 + kind, 50 + 2 * kind)), options

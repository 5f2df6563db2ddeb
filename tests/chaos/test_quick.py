"""Workers that die, sleep and leave under running requests: a quick part of the suite, for every `make test`."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from model.text.grammar import regex_grammar
from service.queue import keys
from service.queue.embedded.redis import EmbeddedRedis
from tests.chaos import cancels, lost_answers, resume_answers
from tests.support.history import JobClient, check_jobs, check_logs, until_received

pytestmark = pytest.mark.timeout(300)

WISHES = (
    {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True},
    {"temperature": 1.0, "seed": 7, "max_tokens": 60, "ignore_eos": True, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "max_tokens": 50, "ignore_eos": True, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 9, "n": 3, "best_of": 4, "max_tokens": 40, "ignore_eos": True},
    {
        "temperature": 1.0,
        "seed": 10,
        "grammar": regex_grammar("[a-z ]{90,120}"),
        "max_tokens": 60,
        "n": 2,
        "best_of": 2,
    },
    {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True, "prompt_logprobs": 2, "logprobs": 1},
)


async def run_some(client: JobClient) -> None:
    for number, options in enumerate(WISHES):
        await client.submit(tuple(range(20 + number, 40 + 3 * number)), **options)


async def finish(fleet, gateway, client, goldens) -> None:
    jobs = await client.over()
    check_jobs(jobs, goldens)
    with fleet.client() as redis:
        check_logs(redis, jobs)
    await gateway.close()


async def test_killed_at_a_token_another_goes_on(fleet, goldens):
    await fleet.have(2)
    gateway = await fleet.gateway()
    client = JobClient(gateway)
    fleet.order("token-5")
    await run_some(client)
    killed_s = await fleet.obeyed("token-5")
    await finish(fleet, gateway, client, goldens)
    resumed = [followed for followed in client.jobs if followed.seen_at_s[-1] > killed_s]
    assert max(followed.first_seen_after(killed_s) for followed in resumed) < fleet.lease_s + 5.0


async def test_answers_of_every_kind_come_out_as_if_nothing_had_been(tmp_path):
    tally = await resume_answers.run(tmp_path, times=8, num_at_once=17, num_subjects=1, needed=frozenset({"messages"}))
    assert tally.different == []
    assert tally.num_resumed >= 8


async def test_lost_answers_lose_double_and_cancel_nothing(tmp_path):
    tally = await lost_answers.run(tmp_path, times=150, num_at_once=48, share=0.05)
    assert tally.is_clean, tally
    assert tally.num_faults >= 35


async def test_clients_that_leave_hold_no_blocks(tmp_path):
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        figures = await cancels.run(server.url, times=40, num_at_once=8)
    finally:
        server.stop()
    assert figures["left"] >= 30
    assert (figures["blocks_left"], figures["jobs_left"]) == (0, 0)


async def test_stopped_past_its_lease_and_woken_it_adds_nothing(fleet, goldens):
    await fleet.have(2)
    gateway = await fleet.gateway()
    client = JobClient(gateway)
    await run_some(client)
    for followed in client.jobs:
        await until_received(followed, 3)
    with fleet.client() as redis:
        owners = {claim.decode().partition(" ")[2] for claim in redis.hvals(keys.CLAIMS)}
    sleeper = next(worker for worker in fleet.living if worker.name in owners)
    sleeper.send(signal.SIGSTOP)
    jobs = await client.over()
    sleeper.send(signal.SIGCONT)
    await asyncio.sleep(1.0)
    check_jobs(jobs, goldens)
    await finish(fleet, gateway, client, goldens)
    assert sleeper.is_alive
    assert "jobs were lost to other workers" in sleeper.output


async def test_asked_to_stop_it_hands_over_at_once(fleet, goldens):
    first, _ = (await fleet.have(2))[:2]
    gateway = await fleet.gateway()
    client = JobClient(gateway)
    for _ in range(3):
        await run_some(client)
    for followed in client.jobs:
        await until_received(followed, 3)
    left_s = time.monotonic()
    assert first.end() == 0, first.output
    took_s = time.monotonic() - left_s
    await finish(fleet, gateway, client, goldens)
    resumed = [followed for followed in client.jobs if followed.seen_at_s[-1] > left_s]
    assert took_s < 5.0
    assert max(followed.first_seen_after(left_s) for followed in resumed) < 3.0

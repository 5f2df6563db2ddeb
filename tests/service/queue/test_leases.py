"""Guarantees of every queue when workers die, return, leave, or are killed by a job."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import EndReason
from service.queue.interface import PROGRESS_EVENTS, Lease
from service.queue.messages import Cancel, Usage
from tests.support.wire import PATIENCE_S, Ended, make_event, make_events, make_job, outcome, read_to_end

LEASE_S = 0.3
NOTHING_LOST = Lease(frozenset(), False)


async def until_taken_over(worker) -> int:
    """Renew the lease and take over from dead workers; return the number of jobs put back."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await worker.renew()
            if num_back := await worker.take_over():
                return num_back
            await asyncio.sleep(0.02)


async def die_with(join, gateway, number: int) -> None:
    """A worker takes a job and is never heard of again; another puts the job back."""
    victim, witness = await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    claim = await victim.fetch_suspect() or (await victim.fetch(1, 1.0))[0]
    assert claim.attempt == number
    assert await until_taken_over(witness) == 1
    await witness.retire("witness")  # in peace: no other engine dies


async def test_the_jobs_of_a_dead_worker_go_on_with_another(join):
    gateway, dead, successor = await join(), await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    events = gateway.follow("JOB1")
    await gateway.submit(make_job())
    await dead.fetch(1, 1.0)
    await dead.publish(make_events("JOB1", [1, 2]))
    await gateway.submit(make_job("JOB2"))
    assert await until_taken_over(successor) == 1
    assert (await gateway.queue_state()).num_waiting == 2
    first, second = await successor.fetch(4, 1.0)
    assert (first.job, first.attempt, first.is_suspect) == (make_job(), 2, False)
    assert list(first.history) == make_events("JOB1", [1, 2])
    assert (second.job.job_id, second.attempt, second.history) == ("JOB2", 1, ())
    await successor.publish([make_event("JOB1", 3), make_event("JOB1", 4, EndReason.STOP)])
    assert await outcome(events) == Ended([1, 2, 3, 4], EndReason.STOP)


async def test_a_heart_that_beats_keeps_its_jobs(join):
    gateway, worker, other = await join(), await join(lease_s=1.0), await join(lease_s=1.0)
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    for _ in range(12):
        assert await worker.renew() == NOTHING_LOST
        assert await other.take_over() == 0
        await asyncio.sleep(0.1)
    assert await worker.publish([make_event("JOB1", 1, EndReason.STOP)]) == frozenset()


async def test_a_lease_that_ran_out_is_renewed_if_none_took_the_jobs(join):
    gateway, worker = await join(), await join(lease_s=0.05)
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    await asyncio.sleep(0.1)
    assert await worker.renew() == NOTHING_LOST
    assert await worker.publish(make_events("JOB1", [1])) == frozenset()


async def test_who_has_lost_a_job_can_write_nothing_of_it(join):
    """A worker stopped past its lease, then woken: what it says of the jobs that others have is refused."""
    gateway, zombie, successor = await join(), await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    events = gateway.follow("JOB1")
    for job_id in ("JOB1", "JOB2"):
        await gateway.submit(make_job(job_id))
    await zombie.fetch(2, 1.0)
    await zombie.publish(make_events("JOB1", [1]))
    assert await until_taken_over(successor) == 2
    await successor.fetch(2, 1.0)
    await gateway.submit(make_job("JOB3"))
    await zombie.fetch(1, 1.0)
    step = [make_event("JOB1", 2, EndReason.LENGTH), make_event("JOB2", 1), make_event("JOB3", 1)]
    assert await zombie.publish(step) == {"JOB1", "JOB2"}
    assert await zombie.publish(make_events("JOB1", [2])) == {"JOB1"}
    assert await zombie.renew() == NOTHING_LOST
    await successor.publish([make_event("JOB1", 2), make_event("JOB1", 3, EndReason.STOP)])
    await successor.publish([make_event("JOB2", 1, EndReason.STOP)])
    assert await outcome(events) == Ended([1, 2, 3], EndReason.STOP)
    await zombie.publish([make_event("JOB3", 2, EndReason.STOP)])
    assert await outcome(gateway.follow("JOB3")) == Ended([1, 2], EndReason.STOP)


async def test_the_heartbeat_returns_lost_jobs(join):
    gateway, zombie, successor = await join(), await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    await gateway.submit(make_job())
    await zombie.fetch(1, 1.0)
    assert await until_taken_over(successor) == 1
    assert await zombie.renew() == Lease(frozenset({"JOB1"}), False)
    assert await zombie.renew() == NOTHING_LOST


async def test_a_job_that_comes_back_to_who_lost_it_is_its_own_again(join):
    gateway, worker, other = await join(), await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    assert await until_taken_over(other) == 1
    (claim,) = await worker.fetch(1, 1.0)
    assert claim.attempt == 2
    assert await worker.publish([make_event("JOB1", 1, EndReason.STOP)]) == frozenset()
    assert await worker.renew() == NOTHING_LOST


async def test_jobs_handed_back_go_on_at_once_and_before_all_others(join):
    gateway, leaver, successor = await join(), await join(), await join()
    events = gateway.follow("JOB1")
    for number in range(4):
        await gateway.submit(make_job(f"JOB{number}"))
    await leaver.fetch(2, 1.0)
    await leaver.publish(make_events("JOB1", [1]))
    waiting = asyncio.create_task(successor.fetch(8, PATIENCE_S))
    await waiting
    fetch = asyncio.create_task(successor.fetch(8, PATIENCE_S))
    await asyncio.sleep(0.05)
    await leaver.hand_back(["JOB1", "JOB0", "JOB9"])
    claims = [*await fetch, *await successor.fetch(8, 0.1)]
    assert sorted((claim.job.job_id, claim.attempt, claim.is_suspect) for claim in claims) == [
        ("JOB0", 2, False),
        ("JOB1", 2, False),
    ]
    assert await leaver.publish(make_events("JOB1", [2])) == {"JOB1"}
    await successor.publish([make_event("JOB1", 2, EndReason.STOP)])
    assert await outcome(events) == Ended([1, 2], EndReason.STOP)


async def test_a_job_that_kills_engines_runs_alone_and_is_buried(join):
    gateway, worker, other = await join(), await join(), await join()
    events = gateway.follow("JOB1")
    await gateway.submit(make_job())
    await die_with(join, gateway, 1)
    await die_with(join, gateway, 2)
    assert (await gateway.queue_state()).num_waiting == 1
    assert list(await worker.fetch(4, 0.05)) == []
    assert (await worker.renew()).runs_suspects
    assert not (await other.renew()).runs_suspects
    claim = await worker.fetch_suspect()
    assert (claim.job.job_id, claim.attempt, claim.is_suspect) == ("JOB1", 3, True)
    assert await worker.fetch_suspect() is None
    await worker.hand_back(["JOB1"], "CUDA error 700")
    assert not (await other.renew()).runs_suspects
    assert list(await other.fetch(4, 0.05)) == []
    (end,) = await read_to_end(events)
    assert (end.number, end.end) == (1, EndReason.POISONED)
    assert (await gateway.queue_state()).num_waiting == 0


async def test_a_suspect_that_is_innocent_completes(join):
    gateway, worker = await join(), await join()
    await gateway.submit(make_job())
    for _ in range(2):
        await worker.fetch(1, 1.0)
        await worker.hand_back(["JOB1"], "another was to blame")
    claim = await worker.fetch_suspect()
    assert claim.is_suspect
    await worker.publish([make_event("JOB1", 1, EndReason.STOP)])
    assert await outcome(gateway.follow("JOB1")) == Ended([1], EndReason.STOP)
    assert not (await worker.renew()).runs_suspects


async def test_engines_that_die_without_it_speak_for_a_suspect(join):
    gateway, worker, other = await join(), await join(), await join()
    await gateway.submit(make_job())
    for _ in range(2):
        await worker.fetch(1, 1.0)
        await worker.hand_back(["JOB1"], "a job was to blame")
    await gateway.submit(make_job("JOB2"))
    await other.fetch(1, 1.0)
    await other.hand_back(["JOB2"], "JOB1 was not there")
    for _ in range(2):
        claim = await worker.fetch_suspect()
        assert (claim.job.job_id, claim.alone_for_events) == ("JOB1", PROGRESS_EVENTS)
        await worker.hand_back(["JOB1"], "no other worker was there")
    assert await worker.fetch_suspect() is None
    assert [claim.job.job_id for claim in await worker.fetch(4, 1.0)] == ["JOB2"]
    assert await outcome(gateway.follow("JOB1")) == Ended([1], EndReason.POISONED)


async def test_an_engine_that_died_shortly_before_speaks_for_a_suspect(join):
    gateway, worker, other = await join(), await join(), await join()
    await gateway.submit(make_job("JOB2"))
    await other.fetch(1, 1.0)
    await other.hand_back(["JOB2"], "JOB1 was not there yet")
    await other.fetch(1, 1.0)
    await gateway.submit(make_job())
    for _ in range(2):
        await worker.fetch(1, 1.0)
        await worker.hand_back(["JOB1"], "a job was to blame")
    for _ in range(2):
        assert (await worker.fetch_suspect()).job.job_id == "JOB1"
        await worker.hand_back(["JOB1"], "no other worker was there")
    assert await worker.fetch_suspect() is None
    assert await worker.fetch(1, 0.1) == []
    assert await outcome(gateway.follow("JOB1")) == Ended([1], EndReason.POISONED)


async def test_a_dead_worker_that_had_it_not_speaks_for_a_job_too(join):
    gateway, worker = await join(), await join()
    await gateway.submit(make_job())
    for _ in range(2):
        await worker.fetch(1, 1.0)
        await worker.hand_back(["JOB1"], "a job was to blame")
    idle, witness = await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    await idle.renew()
    for _ in range(12):  # past two leases: one to be in contact, one to run out
        await witness.renew()
        await witness.take_over()
        await asyncio.sleep(LEASE_S / 4)
    assert (await worker.fetch_suspect()).is_suspect
    await worker.hand_back(["JOB1"], "no other worker was there")
    assert (await worker.fetch_suspect()).is_suspect


async def test_a_suspect_that_gets_on_alone_is_none_any_more(join):
    gateway, worker = await join(), await join()
    await gateway.submit(make_job())
    for _ in range(2):
        await worker.fetch(1, 1.0)
        await worker.hand_back(["JOB1"], "another was to blame")
    assert (await worker.fetch_suspect()).is_suspect
    await worker.publish(make_events("JOB1", range(1, PROGRESS_EVENTS + 1)))
    await worker.hand_back(["JOB1"])
    for _ in range(2):
        (claim,) = await worker.fetch(1, 1.0)
        assert not claim.is_suspect
        await worker.hand_back(["JOB1"], "another was to blame")
    assert await worker.fetch_suspect() is not None


async def test_a_job_that_gets_on_between_deaths_is_suspected_later(join):
    gateway, worker = await join(), await join()
    await gateway.submit(make_job())
    for life in range(6):
        claims = await worker.fetch(1, 0.05)
        claim = claims[0] if claims else await worker.fetch_suspect()
        assert (claim.is_suspect, len(claim.history)) == (life >= 4, 8 * life)
        await worker.publish(make_events("JOB1", range(8 * life + 1, 8 * life + 9)))
        await worker.hand_back(["JOB1"], "a job was to blame")
    assert list(await worker.fetch(1, 0.05)) == []
    assert await outcome(gateway.follow("JOB1")) == Ended(list(range(1, 50)), EndReason.POISONED)


@pytest.mark.parametrize("dies", [True, False])
async def test_a_cancel_outlives_the_worker_that_heard_it(join, dies):
    gateway, worker, successor = await join(), await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    events = gateway.follow("JOB1")
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    await worker.publish(make_events("JOB1", [1]))
    await gateway.cancel(Cancel(job_id="JOB1", reason=EndReason.CANCELLED))
    if dies:
        assert await until_taken_over(successor) == 1
    else:
        await worker.hand_back(["JOB1"])
    assert list(await successor.fetch(1, 0.05)) == []
    assert await outcome(events) == Ended([1, 2], EndReason.CANCELLED)
    assert await worker.publish([make_event("JOB1", 2, EndReason.CANCELLED)]) == {"JOB1"}


async def test_a_queued_job_ends_with_its_cancel_though_no_worker_is_there(join):
    gateway = await join()
    events = gateway.follow("JOB1")
    await gateway.submit(make_job())
    await gateway.cancel(Cancel(job_id="JOB1", reason=EndReason.CANCELLED))
    (end,) = await read_to_end(events)
    assert (end.number, end.end, end.usage) == (1, EndReason.CANCELLED, Usage(prompt_tokens=0, completion_tokens=0))
    assert (await gateway.queue_state()).num_waiting == 0


async def test_a_branch_that_is_not_wanted_is_known_to_the_next_worker(join):
    gateway, worker, successor = await join(), await join(), await join()
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    stop = Cancel(job_id="JOB1", reason=EndReason.STOP, branch=2)
    await gateway.cancel(stop)
    assert list(await worker.fetch_cancels(1.0)) == [stop]
    await worker.hand_back(["JOB1"])
    (claim,) = await successor.fetch(1, 1.0)
    assert claim.stops == (stop,)


async def test_a_job_that_waits_past_its_deadline_ends_there(join):
    gateway, worker = await join(), await join(lease_s=LEASE_S)
    soon_s = await gateway.now_s() + 0.8
    await gateway.submit(make_job("JOB1", deadline_s=soon_s))
    await gateway.submit(make_job("JOB2", deadline_s=soon_s))
    await gateway.submit(make_job("JOB3", deadline_s=soon_s + 60))
    await worker.fetch(1, 1.0)
    await worker.publish(make_events("JOB1", [1]))
    assert await worker.take_over() == 0
    assert (await gateway.queue_state()).num_waiting == 2
    await asyncio.sleep(soon_s - await gateway.now_s() + 0.05)
    assert await worker.take_over() == 0
    assert await outcome(gateway.follow("JOB2")) == Ended([1], EndReason.DEADLINE)
    await worker.hand_back(["JOB1"])
    assert [claim.job.job_id for claim in await worker.fetch(4, 0.05)] == ["JOB3"]
    assert await outcome(gateway.follow("JOB1")) == Ended([1, 2], EndReason.DEADLINE)


async def test_a_job_is_accepted_once(join):
    gateway, worker = await join(), await join()
    await gateway.submit(make_job())
    await gateway.submit(make_job())
    assert len(await worker.fetch(4, 1.0)) == 1
    await gateway.submit(make_job())
    await worker.publish([make_event("JOB1", 1, EndReason.STOP)])
    await gateway.submit(make_job())
    assert list(await worker.fetch(4, 0.05)) == []
    assert await outcome(gateway.follow("JOB1")) == Ended([1], EndReason.STOP)


async def test_a_sequence_that_ends_preempts_none(join):
    gateway, leaver, other = await join(), await join(lease_s=LEASE_S), await join(lease_s=LEASE_S)
    await gateway.submit(make_job())
    await leaver.fetch(1, 1.0)
    await leaver.hand_back(["JOB1"])
    await leaver.retire("w")
    (claim,) = await other.fetch(1, 1.0)
    for _ in range(10):
        await other.renew()
        assert await other.take_over() == 0
        await asyncio.sleep(0.05)
    assert claim.attempt == 2

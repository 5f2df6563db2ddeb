"""Redis' clock is set, forward or back: the queue's goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import time

import pytest

from service.errors import EndReason
from service.queue import keys
from service.queue.interface import QueueUnavailable
from service.queue.redis import link as redis_link
from service.queue.redis.link import RedisLink
from tests.support.queue_pair import memory_pair
from tests.support.wire import PATIENCE_S, Ended, make_card, make_event, make_events, make_job, outcome

AN_HOUR = 3600
SHIFT = "test:shift"
OWN_CLOCK = "redis.call('TIME')"
SET_CLOCK = f"""(function()
  local time = redis.call('TIME')
  return {{tonumber(time[1]) + tonumber(redis.call('GET', '{SHIFT}') or '0'), time[2]}}
end)()"""
"""Redis' clock as the scripts read it, shifted by the test."""


@pytest.fixture
def set_clock(monkeypatch, redis):
    """Shift Redis' clock by this many seconds for its scripts."""
    script_of = redis_link.script_of

    def with_a_clock_that_is_set(name):
        source, _ = script_of(name)
        assert source.count(OWN_CLOCK) == 1
        source = source.replace(OWN_CLOCK, SET_CLOCK)
        return source, redis.script_load(source)

    monkeypatch.setattr(redis_link, "script_of", with_a_clock_that_is_set)
    return lambda by_s: redis.set(SHIFT, by_s)


@pytest.mark.parametrize("by_s", [AN_HOUR, -AN_HOUR])
async def test_the_clock_of_the_queue_goes_on(open_queue, set_clock, by_s):
    queue = await open_queue()
    before_s, started_s = await queue.now_s(), time.monotonic()
    assert before_s == pytest.approx(time.time(), abs=2.0)
    set_clock(by_s)
    for _ in range(5):
        queue._link._clock_read_at_s = float("-inf")
        passed_s = time.monotonic() - started_s
        assert 0.9 * passed_s - 0.1 <= await queue.now_s() - before_s <= 1.1 * passed_s + redis_slack_s()
        await asyncio.sleep(0.05)


def redis_slack_s() -> float:
    """A change by this much is no jump."""
    return 1.5


async def test_the_difference_is_made_up_for_slowly(open_queue, set_clock, redis):
    queue = await open_queue()
    for by_s in (AN_HOUR, -AN_HOUR):
        set_clock(0)
        redis.delete(keys.CLOCK)
        await queue.queue_position("J")
        set_clock(by_s)
        await queue.queue_position("J")
        redis.hset(keys.CLOCK, "wall", float(redis.hget(keys.CLOCK, "wall")) - 100)  # no caller has asked for 100 s
        queue._link._spoke_at_s -= 100
        before_s = float(redis.hget(keys.CLOCK, "queue"))
        await queue.queue_position("J")
        passed_s = float(redis.hget(keys.CLOCK, "queue")) - before_s
        assert passed_s == pytest.approx(105 if by_s > 0 else 95, abs=2.0)


async def test_silence_is_no_jump(open_queue, set_clock):
    """All were away for an hour, and say so, or are new."""
    queue = await open_queue()
    now_s = await queue.now_s()
    set_clock(AN_HOUR)
    assert await (await open_queue()).now_s() == pytest.approx(now_s + AN_HOUR, abs=2.0)
    set_clock(2 * AN_HOUR)
    queue._link._spoke_at_s -= AN_HOUR
    queue._link._clock_read_at_s = float("-inf")
    assert await queue.now_s() == pytest.approx(now_s + 2 * AN_HOUR, abs=2.0)


@pytest.mark.parametrize("by_s", [AN_HOUR, -AN_HOUR])
async def test_jobs_and_leases_live_on(open_queue, set_clock, redis, by_s):
    gateway, worker, other = await open_queue(), await open_queue("w1"), await open_queue("w2")
    for each in (worker, other):
        await each.take_over()
        await each.renew()
        await each.announce(make_card(each._owner))
    events = [gateway.follow(f"J{number}") for number in range(4)]
    now_s = await gateway.now_s()
    for number in (0, 1):  # one runs, one waits
        await gateway.submit(make_job(f"J{number}", deadline_s=now_s + 60))
    assert [claim.job.job_id for claim in await worker.fetch(1, 1.0)] == ["J0"]
    set_clock(by_s)
    for number in (2, 3):
        await gateway.submit(make_job(f"J{number}", deadline_s=await gateway.now_s() + 60))
    other._claimed._contact_since_s -= 60.0  # it may judge
    assert await other.take_over() == 0
    assert (await worker.renew()).lost == frozenset()
    assert {card.worker_id for card in await gateway.workers()} == {"w1", "w2"}
    assert (await gateway.queue_state()).num_leases == 2
    assert len(await other.fetch(4, 1.0)) == 3
    for number, owner in enumerate((worker, other, other, other)):
        assert await owner.publish([*make_events(f"J{number}", [1]), make_event(f"J{number}", 2, EndReason.STOP)]) == (
            frozenset()
        )
    for each in events:
        assert await outcome(each) == Ended([1, 2], EndReason.STOP)


@pytest.mark.parametrize("by_s", [0, AN_HOUR, -AN_HOUR])
async def test_a_worker_that_is_gone_is_still_found_dead(open_queue, set_clock, by_s):
    gateway, dead, successor = await open_queue(), await open_queue(lease_s=1.0), await open_queue(lease_s=1.0)
    await gateway.submit(make_job())
    await dead.fetch(1, 1.0)
    await dead.renew()
    set_clock(by_s)
    await successor.renew()
    async with asyncio.timeout(PATIENCE_S):
        while await successor.take_over() == 0:
            await asyncio.sleep(0.1)
    assert [claim.attempt for claim in await successor.fetch(1, 1.0)] == [2]


async def test_a_deadline_passes_still(open_queue, set_clock):
    gateway, worker = await open_queue(), await open_queue()
    events = gateway.follow("JOB1")
    set_clock(-AN_HOUR)
    await gateway.submit(make_job(deadline_s=await gateway.now_s() + 0.3))
    await asyncio.sleep(0.5)
    await worker.take_over()
    assert await outcome(events) == Ended([1], EndReason.DEADLINE)


async def test_the_clock_of_a_redis_that_is_away(redis_url):
    link = RedisLink("redis://127.0.0.1:1", 0.2)
    with pytest.raises(QueueUnavailable):
        await link.now_s()
    await link.close()


async def test_the_queue_in_memory_keeps_time_too(monkeypatch):
    queue, wall_s = memory_pair(), time.time
    now_s = await queue.now_s()
    await queue.announce(make_card("w1"))
    await queue.submit(make_job("WAITS", deadline_s=now_s + 60))
    monkeypatch.setattr(time, "time", lambda: wall_s() + AN_HOUR)
    assert await queue.now_s() - now_s < PATIENCE_S
    await queue.submit(make_job("NEW", deadline_s=await queue.now_s() + 60))
    assert len(await queue.workers()) == 1
    assert sorted(claim.job.job_id for claim in await queue.fetch(2, 1.0)) == ["NEW", "WAITS"]
    await queue.close()

"""Lost answers of Redis: each command takes effect once, and its caller learns the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.errors import EndReason
from service.queue import keys
from service.queue.interface import Bounds, OutcomeUnknown, QueueFull, QueueUnavailable, Standing
from service.queue.messages import Cancel
from service.queue.redis import feed as redis_feed
from tests.support.queue_pair import QueuePair, open_pair
from tests.support.swallowing_proxy import Fate, SwallowingProxy, answered, once, swallowing
from tests.support.wire import PATIENCE_S, Ended, make_event, make_events, make_job, outcome, persist, take

TIMEOUT_S = 0.5


@pytest.fixture
async def proxy(redis_url) -> AsyncIterator[SwallowingProxy]:
    async with swallowing(redis_url, late_s=2 * TIMEOUT_S) as opened:
        yield opened


@pytest.fixture
async def queue(proxy) -> AsyncIterator[QueuePair]:
    opened = await open_pair(proxy.url, timeout_s=TIMEOUT_S)
    yield opened
    await opened.close()


@pytest.mark.parametrize("fate", [Fate.SWALLOWED, Fate.LATE, Fate.LOST])
async def test_a_job_is_accepted_once(queue, proxy, redis, fate):
    events = queue.follow("JOB1")
    proxy.choose = once("submit", fate=fate)
    await queue.submit(make_job())
    assert proxy.num_faults("submit") == 1
    assert (redis.xlen(keys.WAITING), redis.hlen(keys.JOBS)) == (1, 1)
    await queue.fetch(1, 1.0)
    await queue.publish([make_event("JOB1", 1, EndReason.STOP)])
    assert await outcome(events) == Ended([1], EndReason.STOP)


async def test_a_job_that_has_run_and_ended_meanwhile_is_not_accepted_again(queue, proxy, redis_url):
    worker = await open_pair(redis_url)
    proxy.choose = lambda name: Fate.SWALLOWED if name == "submit" else Fate.ANSWERED
    with pytest.raises(OutcomeUnknown):
        await queue.submit(make_job())
    assert len(await worker.fetch(4, 1.0)) == 1
    await worker.publish(make_events("JOB1", [1]))
    proxy.choose = once("submit")
    await queue.submit(make_job())
    await worker.publish([make_event("JOB1", 2, EndReason.STOP)])
    await queue.submit(make_job())
    assert list(await worker.fetch(4, 0.05)) == []
    assert await outcome(queue.follow("JOB1")) == Ended([1, 2], EndReason.STOP)
    await worker.close()


async def test_a_refusal_is_known_at_once_and_an_unknown_outcome_stays_one(queue, proxy, redis):
    await queue.submit(make_job("A"))
    with pytest.raises(QueueFull):
        await queue.submit(make_job("B"), Bounds(max_jobs=1))
    redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueUnavailable) as refused:
            await queue.submit(make_job("B"))
        assert not isinstance(refused.value, OutcomeUnknown)
        proxy.choose = once("submit", fate=Fate.LOST)
        with pytest.raises(OutcomeUnknown):
            await queue.submit(make_job("B"))
    finally:
        redis.config_set("maxmemory", "0")


async def test_a_job_that_another_gateway_submitted_is_followed_at_once(redis_url, monkeypatch):
    monkeypatch.setattr(redis_feed, "IDLE_CHECK_S", 4 * PATIENCE_S)
    first, second, worker = [await open_pair(redis_url) for _ in range(3)]
    await first.submit(make_job(feed="one"))
    events = second.follow("JOB1")
    await second.submit(make_job(feed="two"))
    await worker.fetch(1, 1.0)
    for number in (1, 2):
        await worker.publish(make_events("JOB1", [number]))
        assert await take(events, 1) == [number]
    await worker.publish([make_event("JOB1", 3, EndReason.STOP)])
    assert await outcome(events) == Ended([3], EndReason.STOP)
    for opened in (first, second, worker):
        await opened.close()


@pytest.mark.parametrize("fate", [Fate.SWALLOWED, Fate.LATE, Fate.LOST])
async def test_events_are_written_once_and_their_worker_loses_nothing(queue, proxy, redis, caplog, fate):
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    for number in range(1, 6):
        proxy.choose = once("publish", fate=fate)
        received = [make_event("JOB1", number, EndReason.STOP if number == 5 else None)]
        if number == 5:
            received = [make_event("JOB1", 5), make_event("JOB1", 6, EndReason.STOP)]
        with pytest.raises(QueueUnavailable):
            await queue.publish(received)
        proxy.choose = answered
        await queue.renew()  # as the heartbeat does between two tries
        assert await persist(lambda received=received: queue.publish(received)) == frozenset()
    assert await outcome(events) == Ended([1, 2, 3, 4, 5, 6], EndReason.STOP)
    assert redis.xlen(keys.events("JOB1")) == 6
    assert "lost to other workers" not in caplog.text
    assert redis.hlen(keys.JOBS) == redis.hlen(keys.CLAIMS) == 0


async def test_a_claim_for_which_there_is_no_room_any_more_goes_back(queue, proxy, redis_url):
    for number in range(4):
        await queue.submit(make_job(f"J{number}"))
    proxy.choose = once("claim")
    with pytest.raises(QueueUnavailable):
        await queue.fetch(4, 1.0)
    claims = await queue.fetch(1, 1.0)
    other = await open_pair(redis_url)
    claims += await other.fetch(4, 1.0)
    assert sorted(claim.job.job_id for claim in claims) == ["J0", "J1", "J2", "J3"]
    await other.close()


async def test_a_death_is_counted_once(queue, proxy, redis):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    proxy.choose = once("hand_back")
    with pytest.raises(QueueUnavailable):
        await queue.hand_back(["JOB1"], "a test")
    await queue.hand_back(["JOB1"], "a test")
    assert redis.hget(keys.DEATHS, "num") == b"1"
    (claim,) = await queue.fetch(1, 1.0)
    await queue.hand_back(["JOB1"], "a test")
    assert (claim.attempt, redis.hget(keys.DEATHS, "num")) == (2, b"2")


@pytest.mark.parametrize("fate", [Fate.SWALLOWED, Fate.LATE, Fate.LOST])
async def test_replies_are_written_once_and_entries_settled(queue, proxy, redis, fate):
    redis.xadd(keys.ingress("alice"), {"m": b"x"})
    proxy.choose = once("XREADGROUP")
    (entry,) = await persist(lambda: queue.ingress.fetch_entries(["alice"], 1, 1.0))
    proxy.choose = once("begin_replies", "XRANGE", fate=fate)
    assert (await persist(lambda: queue.ingress.begin_replies(entry, "a1"))).standing is Standing.OURS
    for number in range(1, 5):
        proxy.choose = once("reply", fate=fate)
        is_last = number == 4
        assert await persist(
            lambda n=number, last=is_last: queue.ingress.reply(entry, "a1", n, b"%d" % n, is_last=last)
        )
    proxy.choose = once("EXEC", fate=fate)
    await persist(lambda: queue.ingress.settle_entry(entry))
    replies = redis.xrange(keys.reply("alice", "a1"))
    assert replies == [(b"%d-0" % number, {b"m": b"%d" % number}) for number in range(1, 5)]
    assert redis.xlen(keys.ingress("alice")) == 0


async def test_a_cancel_whose_answer_is_lost_is_one(queue, proxy):
    await queue.submit(make_job())
    proxy.choose = once("cancel")
    await persist(lambda: queue.cancel(Cancel(job_id="JOB1", reason=EndReason.CANCELLED)))
    async with asyncio.timeout(PATIENCE_S):
        assert await outcome(queue.follow("JOB1")) == Ended([1], EndReason.CANCELLED)


async def test_what_could_not_be_sent_is_refused_at_once(redis_url):
    async with swallowing(redis_url) as proxy:
        queue = await open_pair(proxy.url, timeout_s=PATIENCE_S)
        await queue.now_s()
    async with asyncio.timeout(PATIENCE_S):  # no process listens there now
        with pytest.raises(QueueUnavailable) as refused:
            await persist_refusal(lambda: queue.submit(make_job()))
    assert not isinstance(refused.value, OutcomeUnknown)
    await queue.close()


async def persist_refusal(act) -> None:
    """The first try may meet a connection that is there still."""
    while True:
        try:
            return await act()
        except OutcomeUnknown:
            continue

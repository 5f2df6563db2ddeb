"""Guarantees of the Redis queue alone: keys and their lifetimes, sharing, and no loss between two workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from service.errors import EndReason
from service.queue import keys
from service.queue.codec import encode
from service.queue.interface import Claim, IngressEntry, Lease, QueueUnavailable
from service.queue.messages import Cancel
from tests.support.wire import (
    PATIENCE_S,
    Ended,
    make_card,
    make_event,
    make_events,
    make_job,
    outcome,
)


async def test_two_workers_share_the_jobs(open_queue):
    gateway, one, two = [await open_queue() for _ in range(3)]
    for number in range(6):
        await gateway.submit(make_job(f"J{number}"))
    claims = [*await one.fetch(3, 1.0), *await two.fetch(8, 1.0)]
    assert sorted(claim.job.job_id for claim in claims) == [f"J{number}" for number in range(6)]
    assert list(await one.fetch(1, 0.05)) == []


async def test_a_cancel_reaches_every_worker(open_queue):
    gateway, one, two = [await open_queue() for _ in range(3)]
    cancel = Cancel(job_id="JOB1", reason=EndReason.CANCELLED)
    await gateway.submit(make_job())
    await one.fetch(1, 1.0)
    await gateway.cancel(cancel)
    assert [list(await worker.fetch_cancels(1.0)) for worker in (one, two)] == [[cancel], [cancel]]
    late = await open_queue()
    assert list(await late.fetch_cancels(0.05)) == []


async def test_every_key_has_the_life_it_should(open_queue, redis):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.cancel(Cancel(job_id="JOB2", reason=EndReason.CANCELLED))
    await queue.publish(make_events("JOB1", [1, 2]))
    await queue.announce(make_card("w1"))
    await queue.ingress.reply(IngressEntry("alice", "1-0", b""), "a1", 1, b"x")
    for key, ttl_s in {
        keys.events("JOB1"): keys.LOG_RUNNING_TTL_S,
        keys.cancel("JOB2"): keys.TOMBSTONE_TTL_S,
        keys.feed("door1"): keys.FEED_TTL_S,
        keys.worker("w1"): keys.CARD_TTL_S,
        keys.reply("alice", "a1"): keys.REPLY_TTL_S,
        keys.reply_of("alice", "a1"): keys.LOG_RUNNING_TTL_S,
    }.items():
        assert ttl_s - 2 <= redis.ttl(key) <= ttl_s, key
    await queue.publish([make_event("JOB1", 3, EndReason.STOP)])
    assert keys.LOG_ENDED_TTL_S - 2 <= redis.ttl(keys.events("JOB1")) <= keys.LOG_ENDED_TTL_S
    await queue.submit(make_job("JOB2"))
    assert not redis.exists(keys.cancel("JOB2"))
    await queue.retire("w1")
    streams = (keys.WAITING, keys.RETURNED, keys.SUSPECTS, keys.DEAD)
    assert [redis.xlen(stream) for stream in streams] == [0, 0, 0, 0]
    gone = (keys.JOBS, keys.STATES, keys.CLAIMS, keys.DEADLINES, keys.LEASES, keys.WORKERS, keys.ALONE)
    assert redis.exists(*gone) == 0


async def test_the_log_is_numbered_like_the_events_and_records_its_end(open_queue, redis):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish([make_event("JOB1", 1), make_event("JOB1", 2, EndReason.LENGTH)])
    assert redis.xrange(keys.events("JOB1")) == [
        (b"1-0", {b"m": encode(make_event("JOB1", 1))}),
        (b"2-0", {b"m": encode(make_event("JOB1", 2, EndReason.LENGTH)), b"end": b"length"}),
    ]


async def test_one_step_is_one_command_and_one_feed_entry_a_gateway(open_queue, redis):
    queue = await open_queue()
    for number in range(6):
        await queue.submit(make_job(f"J{number}", feed=f"door{number % 2}"))
    await queue.fetch(6, 1.0)
    await queue.publish([make_event(f"J{number}", 1) for number in range(6)])  # the script is known from here on
    redis.config_resetstat()
    await queue.publish([make_event(f"J{number}", 2) for number in range(6)])
    assert redis.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
    assert [redis.xlen(keys.feed(gateway)) for gateway in ("door0", "door1")] == [2, 2]
    assert redis.info("commandstats")["cmdstat_xadd"]["calls"] == 8


async def test_a_cancel_after_the_end_leaves_nothing(open_queue, redis):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish([make_event("JOB1", 1, EndReason.STOP)])
    await queue.cancel(Cancel(job_id="JOB1", reason=EndReason.CANCELLED))
    assert not redis.exists(keys.cancel("JOB1"))
    assert list(await queue.fetch_cancels(0.0)) == []


async def test_a_fetch_that_is_cut_off_loses_no_job(open_queue):
    queue = await open_queue()
    fetch = asyncio.create_task(queue.fetch(1, PATIENCE_S))
    await asyncio.sleep(0.1)
    # Redis answers the blocked read, whose reader is gone by the time the answer arrives.
    submit = asyncio.create_task(queue.submit(make_job()))
    await asyncio.sleep(0)
    fetch.cancel()
    await submit
    await asyncio.gather(fetch, return_exceptions=True)
    (claim,) = await queue.fetch(1, 1.0)
    assert claim.job.job_id == "JOB1"


async def test_a_worker_that_comes_back_gets_its_jobs_again(open_queue):
    first = await open_queue("w1")
    await first.submit(make_job())
    await first.submit(make_job("JOB2"))
    await first.fetch(1, 1.0)
    await first.publish(make_events("JOB1", [1]))
    await first.close()
    second = await open_queue("w1")
    assert await second.take_over() == 1
    claims = await second.fetch(4, 1.0)
    assert [(claim.job.job_id, claim.attempt) for claim in claims] == [("JOB1", 2), ("JOB2", 1)]
    assert list(claims[0].history) == make_events("JOB1", [1])
    assert (await second.take_over(), list(await second.fetch(4, 0.05))) == (0, [])


async def test_an_answer_that_was_lost_is_given_again(open_queue):
    queue = await open_queue()
    await queue.submit(make_job())
    script = queue._link.script

    async def cut_off(name, *args):
        answer = await script(name, *args)
        if name == "claim":
            raise QueueUnavailable("cut off")
        return answer

    queue._link.script = cut_off
    with pytest.raises(QueueUnavailable):
        await queue.fetch(1, 1.0)
    queue._link.script = script
    assert list(await queue.fetch(1, 1.0)) == [Claim(make_job(), 2)]
    assert list(await queue.fetch(1, 0.05)) == []


async def test_a_job_that_cannot_be_read_is_ended_and_logged(open_queue, redis, caplog):
    queue = await open_queue()
    await queue.submit(make_job("JOB1"))
    redis.hset(keys.JOBS, "JOB1", b"\xc1")
    redis.xadd(keys.WAITING, {"m": b"unknown"})
    redis.xadd(keys.WAITING, {"other": b"x"})
    await queue.submit(make_job("JOB2"))
    assert [claim.job.job_id for claim in await queue.fetch(4, 1.0)] == ["JOB2"]
    assert redis.xlen(keys.WAITING) == 0
    assert caplog.text.count("unreadable job") == 1
    assert await outcome(queue.follow("JOB1")) == Ended([1], EndReason.INVALID)


async def test_a_past_with_a_hole_ends_its_job(open_queue, redis):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1, 2, 3]))
    redis.xdel(keys.events("JOB1"), "2-0")
    await queue.hand_back(["JOB1"])
    assert list(await queue.fetch(1, 0.05)) == []
    last = redis.xrevrange(keys.events("JOB1"), count=1)[0]
    assert (last[0], last[1][b"end"]) == (b"4-0", b"lost")


async def test_events_of_a_job_that_is_not_ours_are_dropped(open_queue, redis):
    queue = await open_queue()
    assert await queue.publish(make_events("JOB9", [1])) == {"JOB9"}
    assert set(redis.keys("*")) == {b"{quire}:epoch", b"{quire}:epoch:clock", b"{quire}:leases"}


async def test_an_ingress_entry_goes_to_one_gateway_and_leaves_with_its_settling(open_queue, redis):
    one, two = await open_queue(), await open_queue()
    redis.xadd(keys.ingress("alice"), {"m": b"first"})  # before any door was there
    redis.xadd(keys.ingress("bob"), {"m": b"second"})
    redis.xadd(keys.ingress("bob"), {"wrong": b"third"})
    entries = await one.ingress.fetch_entries(["alice", "bob"], 8, 1.0)
    assert [(entry.producer, entry.payload) for entry in entries] == [
        ("alice", b"first"),
        ("bob", b"second"),
        ("bob", b""),
    ]
    assert list(await two.ingress.fetch_entries(["alice", "bob"], 8, 0.05)) == []
    for entry in entries:
        await one.ingress.settle_entry(entry)
    assert redis.xlen(keys.ingress("alice")) == redis.xlen(keys.ingress("bob")) == 0
    await one.ingress.reply(entries[0], "a1", 1, b"text")
    assert redis.xrange("{quire}:reply:alice:a1") == [(b"1-0", {b"m": b"text"})]


async def test_an_ingress_entry_unsettled_is_given_again_to_the_same_gateway(open_queue, redis):
    redis.xadd(keys.ingress("alice"), {"m": b"x"})
    first = await open_queue("d1")
    (entry,) = await first.ingress.fetch_entries(["alice"], 8, 1.0)
    assert list(await first.ingress.fetch_entries(["alice"], 8, 0.05)) == []
    await first.close()
    second = await open_queue("d1")
    assert list(await second.ingress.fetch_entries(["alice"], 8, 1.0)) == [replace(entry, was_left=True)]


async def test_what_a_dead_gateway_left_goes_to_another_and_what_a_live_one_keeps_does_not(
    open_queue, redis, monkeypatch
):
    monkeypatch.setattr(keys, "INGRESS_KEEP_S", 0.05)
    monkeypatch.setattr(keys, "INGRESS_LEFT_S", 0.4)
    dead, alive, successor = [await open_queue() for _ in range(3)]
    assert list(await successor.ingress.fetch_entries(["alice"], 8, 0.0)) == []
    redis.xadd(keys.ingress("alice"), {"m": b"x"})
    (left,) = await dead.ingress.fetch_entries(["alice"], 8, 1.0)
    redis.xadd(keys.ingress("alice"), {"m": b"y"})
    (kept,) = await alive.ingress.fetch_entries(["alice"], 8, 1.0)
    async with asyncio.timeout(PATIENCE_S):
        while not (taken := list(await successor.ingress.fetch_entries(["alice"], 8, 0.0))):
            assert list(await alive.ingress.renew_entries()) == []
            await asyncio.sleep(0.05)
    assert taken == [replace(left, was_left=True)]
    assert [(entry.producer, entry.entry_id) for entry in await dead.ingress.renew_entries()] == [
        ("alice", left.entry_id)
    ]
    assert list(await dead.ingress.renew_entries()) == list(await successor.ingress.renew_entries()) == []
    await successor.ingress.settle_entry(taken[0])
    await alive.ingress.settle_entry(kept)
    assert redis.xlen(keys.ingress("alice")) == 0


async def test_a_job_that_ends_while_the_heart_beats_is_not_lost(open_queue, caplog):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    script, has_ended, has_beaten = queue._link.script, asyncio.Event(), asyncio.Event()

    async def slow(name, *args):
        answer = await script(name, *args)
        if name == "publish":  # done, and its answer is long on the way
            has_ended.set()
            await has_beaten.wait()
        return answer

    queue._link.script = slow
    publishing = asyncio.create_task(queue.publish([make_event("JOB1", 1, EndReason.STOP)]))
    await has_ended.wait()
    assert await queue.renew() == Lease(frozenset(), False)
    has_beaten.set()
    assert await publishing == frozenset()
    assert "lost to other workers" not in caplog.text

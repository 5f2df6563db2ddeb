"""Redis failing in every way, and what is left standing when it is back."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal

import msgpack
import pytest
from redis.exceptions import ResponseError

from service.errors import EndReason, StartupError
from service.queue import keys
from service.queue.embedded.redis import EmbeddedRedis
from service.queue.interface import Claim, IngressEntry, QueueUnavailable
from service.queue.messages import Cancel
from service.queue.redis import feed as redis_feed
from service.queue.redis import follower as redis_follower
from tests.support.queue_pair import open_pair
from tests.support.wire import (
    PATIENCE_S,
    Ended,
    follow_begun,
    make_card,
    make_event,
    make_events,
    make_job,
    outcome,
    persist,
    read_to_end,
    take,
)


async def test_a_flushed_redis_is_used_on(open_queue, redis):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    events = queue.follow("JOB1")
    await queue.publish(make_events("JOB1", [1]))
    assert await take(events, 1) == [1]
    fetch = asyncio.create_task(queue.fetch(1, PATIENCE_S))
    await asyncio.sleep(0.05)
    redis.flushall()
    await queue.submit(make_job("JOB2"))
    assert [claim.job.job_id for claim in await fetch] == ["JOB2"]
    await queue.publish([make_event("JOB1", 2), make_event("JOB1", 3, EndReason.STOP)])
    assert await outcome(events) == Ended([2, 3], EndReason.STOP)
    assert keys.LOG_ENDED_TTL_S - 2 <= redis.ttl(keys.events("JOB1")) <= keys.LOG_ENDED_TTL_S
    assert (await queue.queue_state()).num_waiting == 0
    assert list(await queue.ingress.fetch_entries(["alice"], 1, 0.05)) == []
    redis.flushall()
    redis.xadd(keys.ingress("alice"), {"m": b"x"})
    assert len(await queue.ingress.fetch_entries(["alice"], 1, 1.0)) == 1


async def test_a_queued_job_lost_in_a_flush_is_submitted_again(open_queue, redis, monkeypatch):
    monkeypatch.setattr(redis_feed, "IDLE_CHECK_S", 0.2)
    monkeypatch.setattr(redis_feed, "SWEEP_S", 0.05)
    queue = await open_queue()
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    redis.flushall()
    following = asyncio.create_task(outcome(events))
    (claim,) = await queue.fetch(1, PATIENCE_S)
    assert claim == Claim(make_job(), 1)
    await queue.publish([make_event("JOB1", 1, EndReason.STOP)])
    assert await following == Ended([1], EndReason.STOP)


async def test_a_running_job_whose_worker_is_lost_too_ends_with_a_named_reason(open_queue, redis, monkeypatch):
    monkeypatch.setattr(redis_feed, "IDLE_CHECK_S", 0.1)
    monkeypatch.setattr(redis_feed, "SWEEP_S", 0.05)
    monkeypatch.setattr(redis_follower, "LOST_AFTER_S", 0.3)
    gateway, worker = await open_queue(), await open_queue()
    events = gateway.follow("JOB1")
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    await worker.publish(make_events("JOB1", [1]))
    assert await take(events, 1) == [1]
    await worker.close()
    redis.flushall()
    assert await outcome(events) == Ended([2], EndReason.LOST)


async def test_a_flush_takes_nothing_from_running_jobs(open_queue, redis):
    """Whole logs come back: who reads them anew, and who takes the job over, misses nothing."""
    gateway, worker, successor = [await open_queue() for _ in range(3)]
    for job_id in ("JOB1", "JOB2"):
        await gateway.submit(make_job(job_id))
    await worker.fetch(2, 1.0)
    await worker.publish([*make_events("JOB1", [1, 2]), *make_events("JOB2", [1])])
    await worker.publish([make_event("JOB2", 2, EndReason.STOP)])
    redis.flushall()
    await worker.publish(make_events("JOB1", [3]))
    assert await outcome(gateway.follow("JOB2")) == Ended([1, 2], EndReason.STOP)
    await worker.hand_back(["JOB1"])
    (claim,) = await successor.fetch(1, 1.0)
    assert [event.number for event in claim.history] == [1, 2, 3]
    await successor.publish([make_event("JOB1", 4, EndReason.LENGTH)])
    assert await outcome(gateway.follow("JOB1")) == Ended([1, 2, 3, 4], EndReason.LENGTH)


async def test_a_log_is_filled_up_before_events_are_added(open_queue, redis):
    gateway, worker = await open_queue(), await open_queue()
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    for number in range(1, 40):
        await worker.publish(make_events("JOB1", [number]))
    redis.flushall()
    await asyncio.gather(worker.renew(), worker.publish(make_events("JOB1", [40])), worker.renew())
    await worker.publish([make_event("JOB1", 41, EndReason.STOP)])
    assert await outcome(gateway.follow("JOB1")) == Ended(list(range(1, 42)), EndReason.STOP)


async def test_a_primary_that_becomes_a_replica_is_unavailable(open_queue, redis):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    fetching = asyncio.create_task(queue.fetch(1, PATIENCE_S))
    await asyncio.sleep(0.1)
    redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(QueueUnavailable):
            await fetching
        for act in (
            lambda: queue.submit(make_job("JOB2")),
            lambda: queue.publish(make_events("JOB1", [1])),
            queue.renew,
        ):
            with pytest.raises(QueueUnavailable):
                await act()
    finally:
        redis.execute_command("REPLICAOF", "NO", "ONE")
    await queue.publish([make_event("JOB1", 1, EndReason.STOP)])
    assert await outcome(queue.follow("JOB1")) == Ended([1], EndReason.STOP)


async def test_what_the_last_second_lost_is_sent_again(open_queue, redis):
    """A crash of Redis with `everysec`: the end of a log, a claim and a job's end are lost."""
    gateway, worker = await open_queue(), await open_queue()
    jobs = [make_job(f"J{number}") for number in range(3)]
    for job in jobs:
        await gateway.submit(job)
    await worker.fetch(3, 1.0)
    await worker.publish([event for job in jobs for event in make_events(job.job_id, [1, 2, 3])])
    kept = {key: redis.dump(key) for key in redis.keys("*")}
    await worker.publish([make_event(job.job_id, 4) for job in jobs])
    await worker.publish([make_event("J2", 5, EndReason.STOP)])
    redis.flushall()
    for key, value in kept.items():
        redis.restore(key, 0, value)
    redis.xdel(keys.events("J0"), "3-0")
    state = msgpack.unpackb(redis.hget(keys.STATES, "J1"))
    entry = redis.xadd(keys.RETURNED, {"m": "J1"})
    state |= {"attempts": 0, "queue": keys.RETURNED, "entry": entry.decode()}
    redis.hset(keys.STATES, "J1", msgpack.packb(state))
    redis.hdel(keys.CLAIMS, "J1")
    worker._claimed.doubt()
    assert await worker.publish([make_event("J0", 5, EndReason.LENGTH), make_event("J1", 5, EndReason.STOP)]) == set()
    for job, reason in zip(jobs, (EndReason.LENGTH, EndReason.STOP, EndReason.STOP), strict=True):
        log = [int(entry_id.partition(b"-")[0]) for entry_id, _ in redis.xrange(keys.events(job.job_id))]
        assert log[-2:] == [4, 5]
        assert redis.xrange(keys.events(job.job_id))[-1][1][b"end"].decode() == reason
    assert redis.hlen(keys.JOBS) == redis.hlen(keys.CLAIMS) == redis.xlen(keys.RETURNED) == 0


async def test_a_redis_without_memory_is_unavailable_and_keeps_what_it_has(open_queue, redis):
    queue = await open_queue()
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1]))
    redis.config_set("maxmemory", "1")
    try:
        for act in (
            queue.submit(make_job("JOB2")),
            queue.publish(make_events("JOB1", [2])),
            queue.cancel(Cancel(job_id="JOB1", reason=EndReason.STOP)),
            queue.announce(make_card("w1")),
            queue.ingress.reply(IngressEntry("alice", "1-0", b""), "a1", 1, b"x"),
        ):
            with pytest.raises(QueueUnavailable):
                await act
    finally:
        redis.config_set("maxmemory", "0")
    await queue.publish([*make_events("JOB1", [2]), make_event("JOB1", 3, EndReason.STOP)])
    assert await outcome(queue.follow("JOB1")) == Ended([1, 2, 3], EndReason.STOP)


async def test_connections_that_are_cut_come_back(open_queue, redis):
    queue = await open_queue()
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    for number in range(1, 6):
        for kind in ("normal", "replica", "pubsub"):
            redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        await persist(lambda number=number: queue.publish(make_events("JOB1", [number])))
        assert await take(events, 1) == [number]


async def test_a_killed_redis_comes_back_under_its_followers(data_dir, caplog):
    caplog.set_level(logging.INFO, "quire.redis")
    server = EmbeddedRedis.start(data_dir)
    queue = await open_pair(server.url)
    try:
        events = await follow_begun(queue)
        await asyncio.sleep(1.2)  # everysec: what was written is on disk by then
        waiting = asyncio.create_task(take(events, 3))
        fetching = asyncio.create_task(queue.fetch(1, PATIENCE_S))
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        with pytest.raises(QueueUnavailable):
            await fetching
        with pytest.raises(QueueUnavailable):
            await queue.publish(make_events("JOB1", [2]))
        await asyncio.sleep(0.5)
        server = EmbeddedRedis.start(data_dir)
        await persist(lambda: queue.publish([*make_events("JOB1", [2, 3]), make_event("JOB1", 4, EndReason.STOP)]))
        assert await waiting == [2, 3, 4]
        assert await read_to_end(events) == []
        assert caplog.text.count("redis is away reader=feed") == 1
        assert caplog.text.count("redis is back reader=feed") == 1
        await queue.submit(make_job("JOB2"))
        assert [claim.job.job_id for claim in await queue.fetch(1, 1.0)] == ["JOB2"]
    finally:
        await queue.close()
        server.stop()


async def test_an_empty_restart_is_survived(data_dir, tmp_path):
    server = EmbeddedRedis.start(data_dir)
    queue = await open_pair(server.url)
    try:
        await queue.submit(make_job())
        await queue.fetch(1, 1.0)
        await queue.publish(make_events("JOB1", [1]))
        events = queue.follow("JOB1", after=1)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        (data_dir / "appendonlydir").rename(tmp_path / "gone")
        server = EmbeddedRedis.start(data_dir)
        await persist(lambda: queue.publish([make_event("JOB1", 2), make_event("JOB1", 3, EndReason.STOP)]))
        assert await outcome(events) == Ended([2, 3], EndReason.STOP)
        await queue.submit(make_job("JOB2"))
        assert [claim.job.job_id for claim in await queue.fetch(1, 1.0)] == ["JOB2"]
    finally:
        await queue.close()
        server.stop()


async def test_cancelled_calls_never_mix_up_answers(open_queue):
    """The fault of redis-py below 4.5.5: a cancelled call left its answer on the line for the next one."""
    queue = await open_queue()
    dice = random.Random(7)
    await queue.submit(make_job())
    await queue.announce(make_card("w1"))

    async def check(number: int) -> None:
        async with queue._link.commands() as redis:
            assert await redis.echo(f"mine {number}") == f"mine {number}".encode()
        assert [card.worker_id for card in await queue.workers()] == ["w1"]
        await queue.ingress.reply(IngressEntry("alice", f"{number + 1}-0", b""), f"a{number}", 1, b"x")
        assert (await queue.queue_state()).num_waiting == 1

    for round_ in range(40):
        tasks = [asyncio.create_task(check(round_ * 8 + number)) for number in range(8)]
        await asyncio.sleep(dice.uniform(0.0, 0.004))
        for task in dice.sample(tasks, 4):
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://h",
        "redis://",
        "redis://h:port",
        "redis://h/name",
        "unix://",
        "redis://h?decode_responses=yes",
    ],
)
async def test_a_wrong_url_is_refused_before_anything(url):
    with pytest.raises(StartupError, match="Redis URL"):
        await open_pair(url)


async def test_a_wrong_password_is_distinguished_from_an_absent_redis(redis, redis_url):
    redis.execute_command("ACL", "SETUSER", "alice", "on", ">right", "~*", "+@all")
    try:
        with pytest.raises(StartupError, match="refuses us") as refused:
            await open_pair(redis_url.replace("unix://", "unix://alice:wrong@"))
        assert "wrong" not in str(refused.value)
        queue = await open_pair(redis_url.replace("unix://", "unix://alice:right@"))
        await queue.close()
    finally:
        redis.execute_command("ACL", "DELUSER", "alice")
    for url in ("redis://127.0.0.1:1/2", "rediss://:secret@127.0.0.1:1", "unix:///nowhere?db=1"):
        with pytest.raises(QueueUnavailable, match="does not answer"):
            await open_pair(url)


async def test_a_key_of_another_type_is_unavailable_not_a_crash(open_queue, redis):
    redis.mset({keys.WAITING: "x", keys.RETURNED: "x"})
    queue = await open_queue()
    for act in (lambda: queue.submit(make_job()), lambda: queue.fetch(1, 0.05), queue.queue_state):
        with pytest.raises(QueueUnavailable):
            await act()
    with pytest.raises(ResponseError):
        redis.xlen(keys.WAITING)

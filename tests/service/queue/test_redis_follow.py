"""Followers on Redis: other gateways, gaps, slow readers, and what they leave."""

from __future__ import annotations

import asyncio
import gc

import pytest

from service.errors import EndReason
from service.queue import keys
from service.queue.codec import encode
from service.queue.interface import QueueUnavailable
from service.queue.redis import feed as redis_feed
from service.queue.redis import follower as redis_follower
from tests.support.wire import (
    PATIENCE_S,
    Ended,
    follow_begun,
    make_event,
    make_events,
    make_job,
    outcome,
    take,
)


async def test_a_job_of_another_gateway_is_followed(open_queue):
    gateway, other, worker = [await open_queue() for _ in range(3)]
    await gateway.submit(make_job())
    await worker.fetch(1, 1.0)
    await worker.publish(make_events("JOB1", [1, 2]))
    resumed = other.follow("JOB1", after=1)
    assert await take(resumed, 1) == [2]
    await asyncio.sleep(0.3)
    await worker.publish(make_events("JOB1", [3]))
    async with asyncio.timeout(PATIENCE_S / 2):
        assert await take(resumed, 1) == [3]
        await worker.publish([make_event("JOB1", 4, EndReason.STOP)])
        assert await outcome(resumed) == Ended([4], EndReason.STOP)


async def test_a_gap_in_the_feed_is_filled_from_the_log(open_queue, redis):
    queue = await open_queue()
    events = await follow_begun(queue)
    for number in (2, 3):  # in the log, and never in the feed
        redis.xadd(keys.events("JOB1"), {"m": encode(make_event("JOB1", number))}, id=f"{number}-0")
    await queue.publish([make_event("JOB1", 4), make_event("JOB1", 5, EndReason.STOP)])
    assert await outcome(events) == Ended([2, 3, 4, 5], EndReason.STOP)


async def test_a_lost_tail_of_the_feed_is_found(open_queue, redis, monkeypatch):
    monkeypatch.setattr(redis_feed, "IDLE_CHECK_S", 0.2)
    monkeypatch.setattr(redis_feed, "SWEEP_S", 0.05)
    queue = await open_queue()
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1]))
    last = encode(make_event("JOB1", 2, EndReason.STOP))
    redis.xadd(keys.events("JOB1"), {"m": last, "end": "stop"}, id="2-0")
    assert await outcome(events) == Ended([1, 2], EndReason.STOP)


async def test_a_slow_follower_holds_a_bounded_number_of_events(open_queue, monkeypatch):
    monkeypatch.setattr(redis_follower, "BUFFER_EVENTS", 4)
    monkeypatch.setattr(redis_follower, "LOG_PAGE_EVENTS", 8)
    queue = await open_queue()
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    for number in range(1, 50):
        await queue.publish(make_events("JOB1", [number]))
    await queue.publish([make_event("JOB1", 50, EndReason.LENGTH)])
    await asyncio.sleep(0.2)
    assert len(events._buffer) <= 4
    numbers = []
    async for event in events:
        numbers.append(event.number)
        assert len(events._buffer) <= 8
    assert numbers == list(range(1, 51))


async def test_a_dropped_follower_leaves_nothing_behind(open_queue, monkeypatch):
    monkeypatch.setattr(redis_feed, "SWEEP_S", 0.02)
    queue = await open_queue()
    for number in range(20):
        queue.follow(f"J{number}")
        await queue.submit(make_job(f"J{number}"))
    gc.collect()
    async with asyncio.timeout(PATIENCE_S):
        while queue._feeds._followers or queue._feeds._own:
            await asyncio.sleep(0.01)


async def test_a_hole_in_the_log_is_reported(open_queue, redis):
    queue = await open_queue()
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1]))
    await take(events, 1)
    redis.xadd(keys.events("JOB1"), {"m": encode(make_event("JOB1", 3))}, id="3-0")
    await queue.publish(make_events("JOB1", [4]))
    with pytest.raises(QueueUnavailable, match="lost event 2"):
        await take(events, 1)


async def test_closing_wakes_followers(open_queue):
    queue = await open_queue()
    waiting = asyncio.create_task(take(queue.follow("JOB1"), 1))
    await asyncio.sleep(0.05)
    await queue.close()
    with pytest.raises(QueueUnavailable, match="closed"):
        await waiting

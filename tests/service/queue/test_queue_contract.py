"""Guarantees of every queue, in memory and on Redis."""

from __future__ import annotations

import asyncio
import time

import pytest

from service.errors import EndReason
from service.queue.codec import pack_ids
from service.queue.interface import Bounds, QueueFull
from service.queue.messages import Cancel, RequestRecord, Usage
from tests.support.wire import (
    PATIENCE_S,
    Ended,
    make_card,
    make_event,
    make_events,
    make_job,
    outcome,
    read_to_end,
    take,
)


async def test_a_job_reaches_a_worker_as_it_was_submitted(queue):
    job = make_job(tenant="täg", deadline_s=time.time() + 60)
    await queue.submit(job)
    assert (await queue.queue_state()).num_waiting == 1
    (claim,) = await queue.fetch(4, 1.0)
    assert (claim.job, claim.attempt) == (job, 1)
    assert (await queue.queue_state()).num_waiting == 0


async def test_jobs_come_in_order_and_within_the_limit(queue):
    for number in range(5):
        await queue.submit(make_job(f"J{number}"))
    first = await queue.fetch(2, 1.0)
    rest = await queue.fetch(8, 1.0)
    assert [claim.job.job_id for claim in (*first, *rest)] == ["J0", "J1", "J2", "J3", "J4"]


async def test_fetch_waits_no_longer_than_asked(queue):
    started = time.monotonic()
    assert list(await queue.fetch(1, 0.2)) == []
    assert 0.15 < time.monotonic() - started < PATIENCE_S
    assert list(await queue.fetch(1, 0.0)) == []


async def test_fetch_hears_of_a_job_while_it_waits(queue):
    fetch = asyncio.create_task(queue.fetch(1, PATIENCE_S))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await queue.submit(make_job())
    assert len(await fetch) == 1
    assert time.monotonic() - started < PATIENCE_S / 2


async def test_a_worker_that_stops_fetching_leaves_a_job_that_comes_to_others(queue):
    fetch = asyncio.create_task(queue.fetch(1, 0.2))
    await asyncio.sleep(0.05)
    queue.stop_fetching()
    await queue.submit(make_job())
    assert list(await fetch) == list(await queue.fetch(1, 0.05)) == []
    assert (await queue.queue_state()).num_waiting == 1


async def test_events_are_followed_to_the_end(queue):
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    sent = [make_event("JOB1", 1), make_event("JOB1", 2), make_event("JOB1", 3, EndReason.LENGTH)]
    for event in sent:
        await queue.publish([event])
    assert await read_to_end(events) == sent


async def test_events_from_before_the_follower_came_are_not_missed(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1, 2]))
    await asyncio.sleep(0.05)
    assert await take(queue.follow("JOB1"), 2) == [1, 2]


async def test_events_that_have_arrived_are_taken_without_waiting(queue):
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1, 2, 3]))
    assert await take(events, 1) == [1]
    assert [event.number for event in events.take_arrived()] == [2, 3]
    assert list(events.take_arrived()) == []
    await queue.publish([make_event("JOB1", 4, EndReason.STOP)])
    assert await outcome(events) == Ended([4], EndReason.STOP)


async def test_following_after_a_number_leaves_out_what_was_seen(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1, 2, 3]))
    events = queue.follow("JOB1", after=2)
    assert await take(events, 1) == [3]
    await queue.publish([make_event("JOB1", 4, EndReason.STOP)])
    assert await outcome(events) == Ended([4], EndReason.STOP)


async def test_following_after_the_last_number_ends_at_once(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish([make_event("JOB1", 1), make_event("JOB1", 2, EndReason.STOP)])
    assert await read_to_end(queue.follow("JOB1", after=2)) == []


async def test_two_followers_each_see_everything(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    followers = [queue.follow("JOB1"), queue.follow("JOB1")]
    await queue.publish([make_event("JOB1", 1), make_event("JOB1", 2, EndReason.STOP)])
    assert [await outcome(events) for events in followers] == [Ended([1, 2], EndReason.STOP)] * 2


async def test_a_number_is_written_once(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish(make_events("JOB1", [1, 2]))
    await queue.publish(make_events("JOB1", [1, 2]))
    await queue.publish([*make_events("JOB1", [2, 3]), make_event("JOB1", 4, EndReason.STOP)])
    assert await outcome(queue.follow("JOB1")) == Ended([1, 2, 3, 4], EndReason.STOP)


async def test_an_end_settles_the_job_and_a_second_end_changes_nothing(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    await queue.publish([make_event("JOB1", 1, EndReason.STOP)])
    await queue.publish([make_event("JOB1", 2, EndReason.LENGTH)])
    assert await outcome(queue.follow("JOB1")) == Ended([1], EndReason.STOP)
    assert list(await queue.fetch(1, 0.05)) == []
    assert (await queue.queue_state()).num_waiting == 0


async def test_a_step_of_many_jobs_reaches_all(queue):
    job_ids = [f"J{number}" for number in range(40)]
    followers = [queue.follow(job_id) for job_id in job_ids]
    for job_id in job_ids:
        await queue.submit(make_job(job_id))
    assert len(await queue.fetch(64, 1.0)) == 40
    for number in (1, 2):
        await queue.publish([make_event(job_id, number) for job_id in job_ids])
    await queue.publish([make_event(job_id, 3, EndReason.LENGTH) for job_id in job_ids])
    assert [await outcome(events) for events in followers] == [Ended([1, 2, 3], EndReason.LENGTH)] * 40


async def test_a_cancel_reaches_the_workers(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    cancel = Cancel(job_id="JOB1", reason=EndReason.STOP)
    await queue.cancel(cancel)
    assert list(await queue.fetch_cancels(1.0)) == [cancel]
    assert list(await queue.fetch_cancels(0.0)) == []


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.DEADLINE])
async def test_a_job_cancelled_in_the_queue_ends_there(queue, reason):
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    await queue.submit(make_job("JOB2"))
    await queue.cancel(Cancel(job_id="JOB1", reason=reason))
    (claim,) = await queue.fetch(4, 1.0)
    assert claim.job.job_id == "JOB2"
    (end,) = await read_to_end(events)
    assert (end.number, end.end, end.usage) == (1, reason, Usage(prompt_tokens=0, completion_tokens=0))
    assert (await queue.queue_state()).num_waiting == 0


async def test_a_cancel_before_the_job_counts_too(queue):
    await queue.cancel(Cancel(job_id="JOB1", reason=EndReason.CANCELLED))
    await queue.submit(make_job())
    assert list(await queue.fetch(1, 0.1)) == []
    assert (await outcome(queue.follow("JOB1"))).reason is EndReason.CANCELLED


async def test_a_job_past_its_deadline_ends_at_its_claim(queue):
    await queue.submit(make_job(deadline_s=await queue.now_s() - 0.5))
    assert list(await queue.fetch(1, 0.1)) == []
    assert (await outcome(queue.follow("JOB1"))).reason is EndReason.DEADLINE


async def test_workers_are_seen_while_their_heart_beats(queue):
    assert list(await queue.workers()) == []
    await queue.announce(make_card("w1", stats={"x": 1.5}))
    await queue.announce(make_card("w2", ready=False))
    await queue.announce(make_card("w1", stats={"x": 2.5}))
    cards = {card.worker_id: card for card in await queue.workers()}
    assert (cards["w1"].stats, cards["w2"].ready) == ({"x": 2.5}, False)
    assert abs(cards["w1"].beat_at_s - await queue.now_s()) < 1.0
    await queue.retire("w1")
    assert [card.worker_id for card in await queue.workers()] == ["w2"]


async def test_the_clock_is_unix_time_and_moves(queue):
    first = await queue.now_s()
    await asyncio.sleep(0.02)
    assert 0.0 < await queue.now_s() - first < 1.0
    assert abs(first - time.time()) < 5.0


async def test_an_abandoned_follower_is_let_go(queue):
    await queue.submit(make_job())
    await queue.fetch(1, 1.0)
    events = queue.follow("JOB1")
    await queue.publish(make_events("JOB1", [1]))
    await take(events, 1)
    await events.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    await queue.publish([make_event("JOB1", 2, EndReason.STOP)])


@pytest.mark.parametrize("job_id", ["", "a b", "x}:events", "*", "a" * 200])
async def test_an_id_that_would_reach_other_keys_is_refused(queue, job_id):
    with pytest.raises(ValueError, match="Redis key"):
        queue.follow(job_id)


def make_record(request_id: str = "JOB1", **changes) -> RequestRecord:
    now_s = time.time()
    fields = {
        "tenant": "t",
        "endpoint": "/v1/completions",
        "outline": b"{}",
        "digest": b"d",
        "created_s": now_s,
        "deadline_s": now_s + 60.0,
        "num_prompt_tokens": pack_ids([3]),
    }
    return RequestRecord(request_id=request_id, **{**fields, **changes})


async def test_a_request_is_remembered(queue):
    record = make_record(prompt_texts=("a", "b"), stays=True)
    assert await queue.requests.get_request("JOB1") is None
    assert await queue.requests.put_request(record) == "JOB1"
    assert await queue.requests.get_request("JOB1") == record
    for request_id in ("", "a b", "x}:events"):
        with pytest.raises(ValueError, match="Redis key"):
            await queue.requests.get_request(request_id)


async def test_a_record_comes_with_the_job_that_is_accepted(queue):
    record = make_record("A")
    await queue.submit(make_job("A"), record=record)
    assert await queue.requests.get_request("A") == record
    await queue.submit(make_job("A"), record=make_record("A", stays=True))  # a second time changes nothing
    assert not (await queue.requests.get_request("A")).stays
    with pytest.raises(QueueFull):
        await queue.submit(make_job("B"), Bounds(max_jobs=1), make_record("B"))
    assert await queue.requests.get_request("B") is None
    await queue.cancel(Cancel(job_id="C", reason=EndReason.CANCELLED))
    await queue.submit(make_job("C"), record=make_record("C"))  # has ended before it came, and is found
    assert (await queue.requests.get_request("C")).request_id == "C"


async def test_an_idempotency_key_names_the_first_request(queue):
    assert await queue.requests.put_request(make_record("A"), "key") == "A"
    assert await queue.requests.put_request(make_record("B"), "key") == "A"
    assert await queue.requests.get_request("B") is None
    assert await queue.requests.put_request(make_record("A"), "key") == "A"
    assert await queue.requests.put_request(make_record("C"), "other") == "C"
    assert [await queue.requests.find_holder(key) for key in ("key", "other", "none")] == ["A", "C", None]
    assert (await queue.requests.get_request("A")).request_id == "A"


async def test_the_last_event_of_each_job(queue):
    await queue.submit(make_job("A"))
    await queue.submit(make_job("B"))
    await queue.fetch(4, 1.0)
    await queue.publish([*make_events("A", [1, 2]), make_event("B", 1, EndReason.STOP)])
    first, second, none = await queue.last_events(["A", "B", "C"])
    assert (first.number, first.end) == (2, None)
    assert (second.number, second.end) == (1, EndReason.STOP)
    assert none is None


async def test_a_request_is_watched_for_a_while(queue):
    assert not await queue.requests.is_watched("A")
    await queue.requests.mark_watched("A", 30.0)
    assert await queue.requests.is_watched("A")
    await queue.requests.mark_watched("A", 0.01)
    async with asyncio.timeout(5.0):
        while await queue.requests.is_watched("A"):
            await asyncio.sleep(0.005)

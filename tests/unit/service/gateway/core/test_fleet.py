"""A rough view does not wait for the queue; a current one does."""

from __future__ import annotations

import asyncio

import pytest

from service.gateway.core.fleet import MAX_AGE_S, MAX_LATE_S, Fleet
from service.queue.interface import QueueUnavailable
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.fakes.queue.worker import MemoryWorkerQueue
from tests.support.wire import make_card


class SlowQueue(MemoryGatewayQueue):
    """Answers when it is let."""

    def __init__(self):
        super().__init__()
        self.is_away = False
        self.may_answer = asyncio.Event()
        self.num_asked = 0

    async def workers(self):
        self.num_asked += 1
        await self.may_answer.wait()
        if self.is_away:
            raise QueueUnavailable("away")
        return await super().workers()


async def seen(queue: SlowQueue) -> None:
    """Wait until every caller has the view."""
    queue.may_answer.set()
    for _ in range(20):
        await asyncio.sleep(0)
    queue.may_answer.clear()


async def test_a_rough_view_is_the_last_one_while_the_next_is_read():
    queue, now_s = SlowQueue(), 100.0
    fleet = Fleet(queue, "m", lambda: now_s)
    first = asyncio.create_task(fleet.rough_view())
    await seen(queue)
    assert first.result().cards == []
    await MemoryWorkerQueue(queue.data).announce(make_card("w", model="m"))

    now_s += 2 * MAX_AGE_S
    for _ in range(3):
        assert (await fleet.rough_view()).cards == []
    await seen(queue)
    assert queue.num_asked == 2
    assert len((await fleet.rough_view()).cards) == 1


async def test_a_rough_view_gets_no_older_than_that():
    queue, now_s = SlowQueue(), 100.0
    fleet = Fleet(queue, "m", lambda: now_s)
    first = asyncio.create_task(fleet.rough_view())
    await seen(queue)
    first.result()
    queue.is_away = True
    now_s += 2 * MAX_AGE_S
    await fleet.rough_view()
    await seen(queue)
    now_s += MAX_LATE_S
    late = asyncio.create_task(fleet.rough_view())
    await seen(queue)
    with pytest.raises(QueueUnavailable):
        late.result()


async def test_callers_that_wait_for_the_same_view_get_the_same_failure():
    """And not one after the other, each after the timeouts of those before."""
    queue = SlowQueue()
    queue.is_away = True
    fleet = Fleet(queue, "m", lambda: 100.0)
    waiting = [asyncio.create_task(fleet.view()) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await seen(queue)
    assert waiting[0].cancelled()
    assert [type(view.exception()) for view in waiting[1:]] == [QueueUnavailable] * 4
    assert queue.num_asked == 1
    queue.is_away = False
    again = asyncio.create_task(fleet.view())
    await seen(queue)
    assert again.result().cards == []

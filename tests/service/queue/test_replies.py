"""Replies to producers: numbered like events, written once, by the gateway that has the entry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from service.queue import keys
from service.queue.interface import IngressEntry, OutcomeUnknown, QueueUnavailable, Standing
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.fakes.queue.queue_data import QueueData
from tests.support.queue_pair import memory_pair, open_pair
from tests.support.wire import PATIENCE_S


@pytest.fixture(params=["memory", "redis"])
async def gateways(request):
    """Two gateways on one queue."""
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        opened = await open_pair(url), await open_pair(url)
    else:
        data = QueueData()
        opened = memory_pair(data), memory_pair(data)
    yield opened
    for gateway in opened:
        await gateway.close()


@pytest.fixture
def produce(redis) -> Callable[..., Awaitable[IngressEntry]]:
    """Writes an entry, and takes it at a gateway."""

    async def write(gateway, message: bytes = b"x") -> IngressEntry:
        if isinstance(gateway.gateway, MemoryGatewayQueue):
            await gateway.produce("alice", message)
        else:
            redis.xadd(keys.ingress("alice"), {"m": message})
        (entry,) = await gateway.ingress.fetch_entries(["alice"], 1, PATIENCE_S)
        return entry

    return write


async def replies(gateway, entry, name="a1"):
    found = await gateway.ingress.begin_replies(entry, name)
    assert found.standing is Standing.OURS
    return list(found.replies)


async def test_a_reply_is_there_once(gateways, produce):
    gateway, _ = gateways
    entry = await produce(gateway)
    assert await replies(gateway, entry) == []
    for number in (1, 1, 2, 1, 2):
        assert await gateway.ingress.reply(entry, "a1", number, b"%d" % number)
    assert await replies(gateway, entry) == [b"1", b"2"]
    assert await gateway.ingress.reply(entry, "a1", 3, b"3", is_last=True)
    assert await gateway.ingress.reply(entry, "a1", 4, b"4")  # nothing follows the last
    assert await replies(gateway, entry) == [b"1", b"2", b"3"]


async def test_an_entry_that_is_written_twice_is_one_job(gateways, produce):
    gateway, other = gateways
    first = await produce(gateway, b"same")
    await replies(gateway, first)
    second = await produce(other, b"same")
    assert (await other.ingress.begin_replies(second, "a1")).standing is Standing.REPEATED
    await gateway.ingress.reply(first, "a1", 1, b"text", is_last=True)
    assert (await other.ingress.begin_replies(second, "a1")).standing is Standing.REPEATED
    assert await replies(gateway, first) == [b"text"]


async def test_a_name_is_used_again_behind_the_last_reply(gateways, produce):
    gateway, other = gateways
    first = await produce(gateway, b"one")
    await replies(gateway, first)
    second = await produce(other, b"another")
    assert (await other.ingress.begin_replies(second, "a1")).standing is Standing.IN_USE
    assert not await other.ingress.reply(second, "a1", 1, b"mixed in")
    assert await replies(other, second, second.entry_id) == []
    await gateway.ingress.reply(first, "a1", 1, b"text", is_last=True)
    assert await replies(other, second) == []
    assert await other.ingress.reply(second, "a1", 1, b"new")
    assert await replies(other, second) == [b"new"]


async def test_who_lost_an_entry_adds_nothing_to_its_replies(open_queue, redis, monkeypatch):
    monkeypatch.setattr(keys, "INGRESS_LEFT_S", 0.2)
    frozen, successor = await open_queue(), await open_queue()
    redis.xadd(keys.ingress("alice"), {"m": b"x"})
    (entry,) = await frozen.ingress.fetch_entries(["alice"], 1, PATIENCE_S)
    assert await frozen.ingress.reply(entry, "a1", 1, b"Once")
    async with asyncio.timeout(PATIENCE_S):
        while not (taken := await successor.ingress.fetch_entries(["alice"], 1, 0.0)):
            successor._looks_for_left_at_s = 0.0
            await asyncio.sleep(0.05)
    assert not await frozen.ingress.reply(entry, "a1", 2, b" upon a")
    assert (await frozen.ingress.begin_replies(entry, "a1")).standing is Standing.TAKEN
    assert await replies(successor, taken[0]) == [b"Once"]
    assert await successor.ingress.reply(taken[0], "a1", 2, b" upon")
    assert await successor.ingress.reply(taken[0], "a1", 3, b" a time", is_last=True)
    await successor.ingress.settle_entry(taken[0])
    assert await frozen.ingress.reply(entry, "a1", 4, b"!")  # the last reply is there: nothing is written
    assert redis.xrange(keys.reply("alice", "a1")) == [
        (b"1-0", {b"m": b"Once"}),
        (b"2-0", {b"m": b" upon"}),
        (b"3-0", {b"m": b" a time"}),
    ]


async def test_a_refusal_is_no_unknown_outcome(open_queue, redis):
    queue = await open_queue()
    redis.set(keys.reply("alice", "a1"), "not a stream")
    with pytest.raises(QueueUnavailable) as refused:
        await queue.ingress.reply(IngressEntry("alice", "1-0", b""), "a1", 1, b"x")
    assert not isinstance(refused.value, OutcomeUnknown)

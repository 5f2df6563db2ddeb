"""Dead connections are left soon: readers and commands recover without waiting for a poll, a lease or each other's
timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis import Redis

from service.errors import EndReason
from service.queue import keys
from service.queue.codec import encode
from service.queue.interface import QueueUnavailable
from service.queue.messages import Cancel, Part
from service.queue.redis import feed as redis_feed
from service.queue.redis.link import RedisLink
from tests.service.queue.test_redis_sentinel import Server
from tests.support.queue_pair import open_pair
from tests.support.redis_way import ping, pretender
from tests.support.tcp_proxy import proxy_to
from tests.support.wire import PATIENCE_S, follow_begun, make_event, make_events, make_job, persist, take

SOON_S = 5.0
"""Less than what a look or a lease would take, here, and far more than the way needs."""
IN_FUTURE = "99999999999999-0"


@pytest.fixture(autouse=True)
def no_looks(monkeypatch):
    """Events come by their feed."""
    monkeypatch.setattr(redis_feed, "IDLE_CHECK_S", 4 * PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    servers = []

    def start_one(name: str, *options: str) -> Server:
        servers.append(server := Server(tmp_path / name, *options))
        server.until(lambda: server.ask("PING"))
        return server

    yield start_one
    for server in servers:
        server.kill()


async def _name(link: RedisLink) -> int:
    """Return the id of the connection that is taken first."""
    async with link.commands() as redis:
        return await redis.client_id()


async def _soon_cancelled(queue, job_id: str) -> None:
    """The worker hears a cancel."""
    await queue.cancel(Cancel(job_id=job_id, reason=EndReason.CANCELLED))
    async with asyncio.timeout(SOON_S):
        while job_id not in [cancel.job_id for cancel in await persist(lambda: queue.fetch_cancels(0.1))]:
            pass


async def test_none_goes_on_reading_from_a_replica(start):
    """Its address now leads to another server, like a name or a virtual address; it keeps its connections, and would
    answer their reads for ever."""
    old, new = start("old"), start("new")
    async with proxy_to(old.port) as proxy:
        queue = await open_pair(f"redis://127.0.0.1:{proxy.port}")
        events = await follow_begun(queue)
        assert list(await queue.fetch_cancels(0.01)) == []
        old.ask("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(QueueUnavailable):
            await queue.publish(make_events("JOB1", [2]))
        with pytest.raises(QueueUnavailable, match="replica"):  # who comes anew is not fooled either
            await queue.fetch_cancels(0.01)
        proxy.behind = new.port
        await persist(lambda: queue.publish(make_events("JOB1", [2])))
        async with asyncio.timeout(SOON_S):
            assert await take(events, 1) == [2]
        await _soon_cancelled(queue, "JOB1")
        await queue.close()


async def test_one_connection_that_fell_silent_speaks_for_all(start):
    server = start("redis")
    async with proxy_to(server.port) as proxy:
        link = RedisLink(f"redis://127.0.0.1:{proxy.port}", 1.0)
        await asyncio.gather(*(ping(link) for _ in range(8)))
        proxy.fall_silent()
        with pytest.raises(QueueUnavailable, match="no answer in time"):
            await ping(link)
        await asyncio.gather(*(ping(link) for _ in range(8)))
        await link.close()


@pytest.mark.parametrize(
    "error",
    [
        "NOREPLICAS Not enough good replicas to write.",
        "MASTERDOWN Link with MASTER is down",
        "CLUSTERDOWN The cluster is down",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write against a read only slave.",
    ],
)
async def test_who_may_be_no_primary_any_more_is_left(redis_url, error, monkeypatch):
    link = RedisLink(redis_url, 2.0)
    script, clocks = link.script, iter([b"1000", b"2000"])

    async def report_time(name, *args):
        return next(clocks) if name == "clock" else await script(name, *args)

    monkeypatch.setattr(link, "script", report_time)
    assert await _name(link) == await _name(link)
    assert 1000 <= await link.now_s() < 1500
    before = await _name(link)
    with pytest.raises(QueueUnavailable):
        async with link.commands() as redis:
            await redis.eval("return redis.error_reply(ARGV[1])", 0, error)
    assert await _name(link) != before
    assert await link.now_s() >= 2000  # the other's clock may be another
    with pytest.raises(QueueUnavailable):
        async with link.commands() as redis:
            await redis.eval("return redis.error_reply('OOM full')", 0)
    assert await _name(link) == await _name(link)
    await link.close()


async def test_what_is_connected_stays_so_where_no_more_are_let_in(start):
    server = start("redis")
    link = RedisLink(f"redis://127.0.0.1:{server.port}", 2.0)
    own = await _name(link)
    with Redis(port=server.port) as admin:
        admin.config_set("maxclients", len(admin.client_list()))
        for _ in range(3):
            names = await asyncio.gather(_name(link), _name(link), return_exceptions=True)
            assert own in names
            (refused,) = (name for name in names if name != own)
            assert "max number of clients" in str(refused)
    await link.close()


def _slots_at(port: int) -> bytes:
    """Answer to CLUSTER SLOTS of a node that believes this one has all slots."""
    return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port


@pytest.mark.parametrize("wrong", [None, b"", b"-CLUSTERDOWN The cluster is down\r\n", b"$10\r\nrole:slave\r\n"])
async def test_who_reported_a_wrong_way_is_asked_last(start, wrong):
    """A node, or a Sentinel, that is cut off from the others answers as before: it would be believed for ever. What it
    names is closed, silent, alone, or a replica."""
    server = start("redis")
    async with (
        pretender(wrong or b"") as there,
        pretender(_slots_at(1 if wrong is None else there)) as cut_off,
        pretender(_slots_at(server.port)) as sound,
    ):
        link = RedisLink(f"redis+cluster://127.0.0.1:{cut_off},127.0.0.1:{sound}", 1.0)
        with pytest.raises(QueueUnavailable):
            await asyncio.gather(ping(link), ping(link))
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(persist(lambda: ping(link)) for _ in range(4)))
        await link.close()


async def test_streams_that_begin_anew_are_read_from_there(open_queue, redis):
    """Events with smaller ids than those read before: Redis has lost them, and its clock was set back."""
    queue = await open_queue()
    events = await follow_begun(queue)
    redis.xadd(keys.feed("door1"), {"m": b"\x90"}, id=IN_FUTURE)
    redis.xadd(keys.CANCELS, {"m": b""}, id=IN_FUTURE)
    assert list(await queue.fetch_cancels(0.1)) == []
    async with asyncio.timeout(PATIENCE_S):
        while queue._feeds._positions[keys.feed("door1")] != IN_FUTURE:
            await asyncio.sleep(0.01)
    redis.delete(keys.feed("door1"), keys.CANCELS)
    await queue.publish(make_events("JOB1", [2]))
    async with asyncio.timeout(SOON_S):
        assert await take(events, 1) == [2]
    await _soon_cancelled(queue, "JOB1")


async def test_more_than_redis_takes_at_once_is_sent_in_parts(open_queue, redis):
    """A worker with long prompts that computed through an outage: restored in one call, it would be refused for
    ever."""
    queue = await open_queue()
    jobs = [make_job(f"J{number}", prompt=b"\0" * (1 << 20)) for number in range(18)]
    for job in jobs:
        await queue.submit(job)
    assert len(await queue.fetch(len(jobs), 1.0)) == len(jobs)
    assert await queue.publish([make_event(job.job_id, 1) for job in jobs]) == frozenset()
    redis.flushall()
    long = Part(tokens=b"\0" * 1_000_000)
    events = [replace(make_event(job.job_id, 2), parts=(long,)) for job in jobs]
    assert await persist(lambda: queue.publish(events), SOON_S) == frozenset()
    assert [redis.xlen(keys.events(job.job_id)) for job in jobs] == [2] * len(jobs)
    assert redis.hlen(keys.JOBS) == redis.hlen(keys.CLAIMS) == len(jobs)


async def test_a_reader_that_was_too_late_for_its_feed_looks_at_the_logs(open_queue, redis):
    """More came than a feed keeps, and with it went the last word of a job: no later number shows the gap."""
    queue = await open_queue()
    events = await follow_begun(queue)
    end = encode(make_event("JOB1", 2, EndReason.STOP))
    redis.xadd(keys.events("JOB1"), {"m": end, "end": "stop"}, id="2-0")
    with redis.pipeline(transaction=True) as pipeline:  # as others publish, while this process is held up
        for _ in range(2 * redis_feed.PAGE_ENTRIES):
            pipeline.xadd(keys.feed("door1"), {"m": b"\x90"})
        pipeline.xtrim(keys.feed("door1"), maxlen=redis_feed.PAGE_ENTRIES, approximate=False)
        pipeline.execute()
    async with asyncio.timeout(SOON_S):
        assert await take(events, 1) == [2]


async def test_an_entry_that_none_answers_is_given_out_again(open_queue, redis: Redis, monkeypatch):
    """It was fetched, and its answer could not be written: while its gateway lives and says what it works on, too."""
    monkeypatch.setattr(keys, "INGRESS_KEEP_S", 0.05)
    monkeypatch.setattr(keys, "INGRESS_LEFT_S", 0.2)
    gateway, other = await open_queue(), await open_queue()
    redis.xadd(keys.ingress("alice"), {"m": b"x"})
    (entry,) = await gateway.ingress.fetch_entries(["alice"], 8, 1.0)
    gateway.ingress.release_entry(entry)
    async with asyncio.timeout(SOON_S):
        while not (taken := list(await other.ingress.fetch_entries(["alice"], 8, 0.0))):
            assert list(await gateway.ingress.renew_entries()) == []
            await asyncio.sleep(0.05)
    assert [(again.entry_id, again.was_left) for again in taken] == [(entry.entry_id, True)]


async def test_entries_are_kept_though_another_stream_is_lost(open_queue, redis: Redis):
    gateway = await open_queue("d1")
    for producer in ("alice", "bob"):
        redis.xadd(keys.ingress(producer), {"m": b"x"})
    entries = await gateway.ingress.fetch_entries(["alice", "bob"], 8, 1.0)
    assert [entry.producer for entry in entries] == ["alice", "bob"]
    redis.delete(keys.ingress("alice"))
    long_ms = 1_000_000
    bob = (keys.ingress("bob"), keys.INGRESS_GROUP)
    redis.xclaim(*bob, "d1", 0, [entries[1].entry_id], idle=long_ms, justid=True)
    assert list(await gateway.ingress.renew_entries()) == []
    (pending,) = redis.xpending_range(*bob, "-", "+", 8)
    assert pending["time_since_delivered"] < long_ms

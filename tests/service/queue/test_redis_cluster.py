"""Nodes of a Redis Cluster, all real: the queue lives in one slot, and goes where that slot goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.crc import key_slot

from service.errors import EndReason
from service.queue import keys
from service.queue.interface import QueueUnavailable
from service.queue.messages import RequestRecord
from service.queue.records import ANSWERED_WELL, Batch, Move, StorageFull, StorageLimits
from service.queue.redis import feed as redis_feed
from tests.service.queue.test_redis_sentinel import Server
from tests.support.certificates import OPENSSL, Certificates, make_certificates
from tests.support.queue_pair import QueuePair, open_pair
from tests.support.tls_proxy import tls_in_front_of
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
)

SLOT = key_slot(keys.JOBS.encode())


@pytest.fixture
def nodes(tmp_path) -> Iterator[tuple[Server, Server]]:
    """Two primaries that know each other; the first has all slots."""
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    made = [Server(tmp_path / name, *options) for name in ("one", "two")]
    try:
        for node in made:
            node.until(lambda node=node: node.ask("PING"))
        made[0].ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        made[0].ask("CLUSTER", "MEET", "127.0.0.1", str(made[1].port))
        for node in made:
            node.until(lambda node=node: _is_up(node))
        yield made[0], made[1]
    finally:
        for node in made:
            node.kill()


def _is_up(node: Server) -> bool:
    found = node.ask("CLUSTER", "INFO")
    return b"cluster_state:ok" in found and b"cluster_slots_ok:16384" in found


def move_slot(source: Server, target: Server) -> None:
    """Move the slot as rebalancing a Cluster does."""
    source_id, target_id = (node.ask("CLUSTER", "MYID").decode() for node in (source, target))
    target.ask("CLUSTER", "SETSLOT", str(SLOT), "IMPORTING", source_id)
    source.ask("CLUSTER", "SETSLOT", str(SLOT), "MIGRATING", target_id)
    with Redis(port=source.port) as redis:
        while found := redis.execute_command("CLUSTER GETKEYSINSLOT", SLOT, 100):
            redis.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *found)
    for node in (target, source):
        node.ask("CLUSTER", "SETSLOT", str(SLOT), "NODE", target_id)


@pytest.fixture
async def queue(nodes):
    opened = await open_pair(f"redis+cluster://127.0.0.1:{nodes[1].port}")
    yield opened
    await opened.close()


def test_every_key_of_the_queue_is_in_one_slot():
    made = (keys.events("J"), keys.cancel("J"), keys.request("r"), keys.feed("d"), keys.worker("w"), keys.ingress("p"))
    made = (
        *keys.QUEUE,
        *made,
        keys.reply("p", "1"),
        keys.reply_of("p", "1"),
        keys.DEATHS,
        keys.waiting_since("normal"),
    )
    assert {key_slot(key.encode()) for key in made} == {SLOT}


async def test_a_job_goes_through_a_cluster(queue):
    """Asked at the node that has not the slot: the way to the other one is found."""
    events = queue.follow("JOB1")
    await queue.submit(make_job())
    normal = (await queue.queue_state()).lanes["normal"]
    assert (normal.num_jobs, normal.oldest_at_s) == (1, pytest.approx(await queue.now_s(), abs=PATIENCE_S))
    (claim,) = await queue.fetch(4, 1.0)
    assert claim.job == make_job()
    assert await queue.publish(make_events("JOB1", [1, 2])) == frozenset()
    await queue.renew()
    await queue.take_over()
    assert await queue.publish([make_event("JOB1", 3, EndReason.STOP)]) == frozenset()
    assert await outcome(events) == Ended([1, 2, 3], EndReason.STOP)
    await queue.announce(make_card("w"))
    assert [card.worker_id for card in await queue.workers()] == ["w"]
    record = RequestRecord(
        request_id="R", tenant="t", endpoint="/v1/completions", outline=b"{}", digest=b"", created_s=1.0,
        deadline_s=await queue.now_s() + 60, num_prompt_tokens=b"",
    )  # fmt: skip
    await queue.requests.put_request(record)
    assert await queue.requests.get_request("R") == record


async def test_producers_are_heard_in_a_cluster(queue, nodes):
    with Redis(port=nodes[0].port) as redis:
        redis.xadd(keys.ingress("alice"), {"m": b"x"})
    (entry,) = await queue.ingress.fetch_entries(["alice"], 1, 1.0)
    assert await queue.ingress.reply(entry, "1", 1, b"hello")
    assert list((await queue.ingress.begin_replies(entry, "1")).replies) == [b"hello"]
    await queue.ingress.settle_entry(entry)


async def test_what_a_tenant_stores_is_bounded_in_a_cluster(queue):
    limits = StorageLimits(max_bytes_per_tenant=4096, queue_share=0.5)
    batch = Batch(
        batch_id="b", tenant="t", endpoint="/v1/completions", input_file_id="file-1", created_s=1.0, expires_s=9.0
    )
    assert await queue.batches.append_file("file-1", "t", b"x" * 3000, limits) == 1
    with pytest.raises(StorageFull):
        await queue.batches.append_file("file-2", "t", b"x" * 2000, limits)
    await queue.batches.put_line(batch, 0, b"answer", ANSWERED_WELL, limits)
    assert (await queue.batches.line_marks("b"), await queue.batches.lines("b", 0, 1)) == (b"+", [b"answer"])
    move = Move(first=0, past=1, num_bytes=6, output_file_id="file-3", error_file_id="file-4", output=b"x", errors=b"")
    assert await queue.batches.move_lines(batch, move) == 1
    await queue.batches.drop_lines(batch)
    await queue.batches.drop_file("file-1", "t")
    await queue.batches.append_file("file-2", "t", b"x" * 3000, limits)


async def test_the_queue_goes_where_its_slot_goes(nodes, queue: QueuePair, monkeypatch):
    monkeypatch.setattr(redis_feed, "IDLE_CHECK_S", 2 * PATIENCE_S)  # events come by their feed, not by a look
    events = await follow_begun(queue)
    await asyncio.to_thread(move_slot, *nodes)
    await persist(lambda: queue.publish([make_event("JOB1", 2)]))
    await persist(lambda: queue.publish([make_event("JOB1", 3, EndReason.STOP)]))
    assert await outcome(events) == Ended([2, 3], EndReason.STOP)
    await persist(lambda: queue.submit(make_job("JOB2")))
    assert [found.job.job_id for found in await persist(lambda: queue.fetch(1, 1.0))] == ["JOB2"]
    with Redis(port=nodes[1].port) as redis:
        assert redis.hlen(keys.JOBS) == 1


@pytest.fixture
def behind_tls(nodes, tmp_path) -> Iterator[tuple[int, Certificates]]:
    """Yield the second node's port and certificate: servers without TLS after TLS proxies, whose ports the nodes
    announce."""
    if OPENSSL is None:
        pytest.skip("openssl is not installed, which makes the certificates")
    made = make_certificates(tmp_path / "tls")
    with tls_in_front_of(nodes[0].port, made) as first, tls_in_front_of(nodes[1].port, made) as second:
        for node, port in zip(nodes, (first, second), strict=True):
            node.ask("CONFIG", "SET", "cluster-announce-port", str(port))
        nodes[1].until(lambda: nodes[1].ask("CLUSTER", "SLOTS")[0][2][1] == first)
        yield second, made


async def test_the_way_to_a_cluster_may_be_tls(behind_tls, tmp_path):
    port, made = behind_tls
    queue = await open_pair(f"rediss+cluster://localhost:{port}?ssl_ca_certs={made.authority}")
    try:
        events = queue.follow("JOB1")
        await queue.submit(make_job())
        await queue.fetch(1, 1.0)
        await queue.publish([make_event("JOB1", 1, EndReason.STOP)])
        assert await outcome(events) == Ended([1], EndReason.STOP)
    finally:
        await queue.close()
    other = make_certificates(tmp_path / "strangers")
    with pytest.raises(QueueUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await open_pair(f"rediss+cluster://localhost:{port}?ssl_ca_certs={other.authority}")

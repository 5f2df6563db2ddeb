"""Bytes that a tenant may store and that stay reserved for the queue, in memory and on Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from redis import Redis

from service.queue.messages import RequestRecord
from service.queue.records import (
    ANSWERED_WELL,
    OVERHEAD_BYTES,
    Batch,
    StorageFull,
    StorageLimits,
    StoredFile,
    StoredResponse,
    pack_response,
)
from tests.fakes.queue.gateway import MemoryGatewayQueue
from tests.support.wire import make_job

KIB = 1 << 10
LIMITS = StorageLimits(max_bytes_per_tenant=64 * KIB)


def make_file(number: int, num_bytes: int, tenant: str = "t") -> StoredFile:
    fields = {"filename": "f", "purpose": "batch", "num_bytes": num_bytes, "created_s": 1.0}
    return StoredFile(file_id=f"file-{number}", tenant=tenant, **fields)


def make_response(number: int, num_bytes: int, tenant: str = "t") -> StoredResponse:
    record = StoredResponse(response_id=f"resp_{number}", tenant=tenant, created_s=1.0, answer={"status": "queued"})
    filled = num_bytes - len(pack_response(replace(record, input=[{"x": ""}])))
    return replace(record, input=[{"x": "x" * filled}])


def make_record(number: int, now_s: float, num_bytes: int, **changes) -> RequestRecord:
    fields = {"endpoint": "/v1/completions", "digest": b"x" * 32, "num_prompt_tokens": b"", "tenant": "t"}
    return RequestRecord(
        request_id=f"R{number}",
        outline=b"x" * num_bytes,
        created_s=now_s,
        deadline_s=now_s + 60,
        **{**fields, **changes},
    )


async def refused(asked) -> StorageFull:
    with pytest.raises(StorageFull) as caught:
        await asked
    return caught.value


async def test_files_count_while_they_are_written_and_until_they_are_dropped(queue):
    for _ in range(2):
        await queue.batches.append_file("file-1", "t", b"x" * 20 * KIB, LIMITS)
    full = await refused(queue.batches.append_file("file-1", "t", b"x" * 25 * KIB, LIMITS))
    assert (full.of_tenant, full.num_bytes, full.max_bytes) == (True, 40 * KIB, 64 * KIB)
    assert len(await queue.batches.file_pieces("file-1", 0, 9)) == 2, "what is refused is not written"
    await queue.batches.append_file("file-2", "another", b"x" * 60 * KIB, LIMITS)
    await queue.batches.put_file(make_file(1, 40 * KIB))
    assert (
        await refused(queue.batches.append_file("file-3", "t", b"x" * 24 * KIB, LIMITS))
    ).num_bytes == 40 * KIB + OVERHEAD_BYTES
    await queue.batches.drop_file("file-1", "t")
    await queue.batches.append_file("file-3", "t", b"x" * 64 * KIB, LIMITS)
    await queue.batches.drop_file("file-3", "t")
    await queue.batches.append_file("file-4", "t", b"x" * 64 * KIB, LIMITS)


async def test_what_is_reserved_for_a_file_counts_before_it_comes_and_not_twice(queue):
    await queue.batches.reserve_file("file-1", "t", 40 * KIB, LIMITS)
    assert (await refused(queue.batches.reserve_file("file-2", "t", 25 * KIB, LIMITS))).num_bytes == 40 * KIB
    await queue.batches.append_file("file-1", "t", b"x" * 40 * KIB, LIMITS, is_reserved=True)
    await queue.batches.put_file(make_file(1, 20 * KIB))
    await queue.batches.reserve_file("file-2", "t", 40 * KIB, LIMITS)


async def test_responses_count_until_they_expire_or_are_dropped(queue):
    size = 16 * KIB - OVERHEAD_BYTES
    for number, for_s in enumerate((0.4, 60, 60, 60)):
        await queue.responses.put_response(make_response(number, size), for_s, LIMITS)
    full = await refused(queue.responses.put_response(make_response(4, 600), 60, LIMITS))
    assert (full.num_bytes, full.max_bytes) == (64 * KIB, 64 * KIB)
    assert await queue.responses.get_response("resp_4") is None
    async with asyncio.timeout(10):
        while await queue.responses.get_response("resp_0") is not None:
            await asyncio.sleep(0.02)
    await queue.responses.put_response(make_response(5, size), 60, LIMITS)
    await refused(queue.responses.put_response(make_response(4, 600), 60, LIMITS))
    await queue.responses.drop_response(make_response(1, size))
    await queue.responses.drop_response(make_response(1, size))
    await queue.responses.put_response(make_response(4, size), 60, LIMITS)
    await refused(queue.responses.put_response(make_response(6, 600), 60, LIMITS))


async def test_an_answer_takes_the_place_of_the_question_and_is_never_refused(queue):
    await queue.responses.put_response(make_response(1, 60 * KIB), 60, LIMITS)
    await queue.responses.settle_response(make_response(1, 70 * KIB), 60)
    assert (
        await refused(queue.responses.put_response(make_response(2, KIB), 60, LIMITS))
    ).num_bytes == 70 * KIB + OVERHEAD_BYTES
    await queue.responses.settle_response(make_response(1, 30 * KIB), 60)
    await queue.responses.put_response(make_response(2, 33 * KIB), 60, LIMITS)
    await queue.responses.settle_response(make_response(3, 30 * KIB), 60)
    assert (
        await refused(queue.responses.put_response(make_response(4, 600), 60, LIMITS))
    ).num_bytes == 63 * KIB + 2 * OVERHEAD_BYTES


async def test_answers_of_a_batch_count_until_it_has_ended(queue):
    batch = Batch(
        batch_id="batch_1", tenant="t", endpoint="/v1/completions", input_file_id="f", created_s=1.0, expires_s=9.0
    )
    await queue.batches.put_batch(batch, LIMITS)
    await queue.batches.reserve_lines(batch, 10 * KIB, LIMITS)
    await refused(queue.batches.reserve_lines(batch, 70 * KIB, LIMITS))
    await queue.batches.put_line(batch, 0, b"x" * 40 * KIB, ANSWERED_WELL, LIMITS)
    await refused(queue.batches.put_line(batch, 1, b"x" * 30 * KIB, ANSWERED_WELL, LIMITS))
    assert await queue.batches.line_marks("batch_1") == b"+"
    await queue.batches.drop_lines(batch)
    await queue.batches.append_file("file-1", "t", b"x" * 50 * KIB, LIMITS)


async def test_records_of_requests_that_stay_are_refused_and_of_others_left_out(queue):
    now_s = await queue.now_s()
    await queue.requests.put_request(make_record(1, now_s, 20 * KIB), "key", LIMITS)
    full = await refused(queue.requests.put_request(make_record(2, now_s, 20 * KIB), "other-key", LIMITS))
    assert (full.of_tenant, full.max_bytes) == (True, 32 * KIB)
    assert await queue.requests.put_request(make_record(3, now_s, 20 * KIB), "key", LIMITS) == "R1", (
        "nothing more is stored"
    )
    stays = make_record(4, now_s, 20 * KIB, stays=True)
    await refused(queue.submit(make_job("R4"), record=stays, limits=LIMITS))
    assert await queue.backlog("t") == replace(await queue.backlog("t"), num_jobs=0)
    await queue.submit(make_job("R5"), record=make_record(5, now_s, 10), limits=LIMITS)
    assert await queue.requests.get_request("R5") is None
    assert (await queue.backlog("t")).num_jobs == 1
    await queue.requests.drop_request("R1", "t", "key")
    await queue.submit(make_job("R4"), record=stays, limits=LIMITS)
    await queue.submit(make_job("R6"), record=make_record(6, now_s, 10, tenant="another"), limits=LIMITS)
    assert [await queue.requests.get_request(name) is None for name in ("R4", "R6")] == [False, False]
    assert await queue.requests.put_request(make_record(7, now_s, 10), "key", LIMITS) == "R7", "forgotten with its key"


async def test_a_record_is_charged_once(queue):
    now_s = await queue.now_s()
    for _ in range(9):
        await queue.requests.put_request(make_record(1, now_s, 20 * KIB), "key", LIMITS)
    await queue.requests.put_request(make_record(2, now_s, 10 * KIB), None, LIMITS)


@pytest.fixture
def memory(request: pytest.FixtureRequest):
    """Says how much memory the queue has, in all."""

    def limit(queue, num_bytes: int) -> None:
        if isinstance(queue.gateway, MemoryGatewayQueue):
            queue.data.batch_data.ledger.max_memory_bytes = num_bytes
            return
        with Redis.from_url(request.getfixturevalue("redis_url")) as redis:
            redis.config_set("maxmemory", num_bytes)
            request.addfinalizer(lambda: Redis.from_url(redis_url).config_set("maxmemory", 2 << 30))
            redis_url = request.getfixturevalue("redis_url")

    return limit


async def test_a_share_of_the_memory_is_the_queues_own(request, queue, memory):
    if request.node.callspec.params["queue"] == "roles":
        pytest.skip("the server of the roles keeps its settings")
    memory(queue, 32 << 20)
    limits = StorageLimits(max_bytes_per_tenant=1 << 30, queue_share=0.5)
    now_s = await queue.now_s()

    async def fill() -> None:
        for number in range(100):
            await queue.batches.append_file(f"file-{number}", f"tenant-{number % 9}", b"x" * (256 * KIB), limits)

    full = await refused(fill())
    assert (full.of_tenant, full.max_bytes) == (False, 16 << 20)
    for refusal in (
        queue.responses.put_response(make_response(1, 256 * KIB), 60, limits),
        queue.batches.put_batch(
            Batch(batch_id="b", tenant="u", endpoint="e", input_file_id="f" * 256 * KIB, created_s=1.0, expires_s=2.0),
            limits,
        ),
    ):
        assert not (await refused(refusal)).of_tenant
    for number in range(20):
        await queue.submit(make_job(f"J{number}", prompt=b"x" * (256 * KIB)))
    await queue.submit(make_job("R1"), record=make_record(1, now_s, KIB, stays=True), limits=limits)
    assert await queue.requests.get_request("R1") is not None, "the queue goes on"

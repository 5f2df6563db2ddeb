"""Files and batches, in memory and on Redis alike."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from service.wire.batches import Batch, BatchError, BatchStatus, StoredFile


def make_file(number: int, tenant: str = "t", **changes) -> StoredFile:
    fields = {"filename": "é.jsonl", "purpose": "batch", "num_bytes": 3, "created_s": 100.0 + number}
    return StoredFile(**{"file_id": f"file-{number}", "tenant": tenant, **fields, **changes})


def make_batch(number: int, tenant: str = "t", **changes) -> Batch:
    fields = {"endpoint": "/v1/completions", "input_file_id": "file-1", "expires_s": 900.0}
    return Batch(**{"batch_id": f"batch_{number}", "tenant": tenant, "created_s": 100.0 + number, **fields, **changes})


async def test_a_file_comes_back_whole(broker):
    data = bytes(range(256)) * 9000
    await broker.put_file(make_file(1), data)
    assert await broker.file("file-1") == make_file(1)
    assert await broker.file_data("file-1") == data
    await broker.put_file(make_file(2), b"")
    assert await broker.file_data("file-2") == b""


async def test_a_tenant_sees_its_own_files_the_newest_first(broker):
    for number, tenant in enumerate("aba"):
        await broker.put_file(make_file(number, tenant), b"x")
    assert [file.file_id for file in await broker.files("a")] == ["file-2", "file-0"]
    await broker.drop_file(make_file(2, "a"))
    assert [file.file_id for file in await broker.files("a")] == ["file-0"]
    assert await broker.file("file-2") is None
    assert await broker.file_data("file-2") == b""


@pytest.mark.parametrize("name", ["a/b", "", "x" * 200, "a:b", "{a}"])
async def test_an_id_that_no_key_may_hold_is_refused(broker, name):
    for asked in (broker.file(name), broker.file_data(name), broker.batch(name)):
        with pytest.raises(ValueError, match="Redis key"):
            await asked


async def test_a_batch_is_open_until_it_ends(broker):
    for number in range(3):
        await broker.put_batch(make_batch(number))
    assert await broker.open_batches() == ["batch_0", "batch_1", "batch_2"]
    done = replace(
        make_batch(1),
        status=BatchStatus.FAILED,
        errors=(BatchError(code="c", message="m", line=3),),
        metadata={"k": "v"},
        at_s={"failed": 7.5},
    )
    await broker.put_batch(done)
    assert await broker.batch("batch_1") == done
    assert await broker.open_batches() == ["batch_0", "batch_2"]
    assert [batch.batch_id for batch in await broker.batches("t")] == ["batch_2", "batch_1", "batch_0"]
    assert await broker.batches("other") == []


async def test_one_holds_a_batch_at_a_time(broker):
    assert await broker.hold_batch("batch_1", "me", 5)
    assert await broker.hold_batch("batch_1", "me", 0.5)
    assert not await broker.hold_batch("batch_1", "you", 0.5)
    await asyncio.sleep(0.6)
    assert await broker.hold_batch("batch_1", "you", 5)
    assert not await broker.hold_batch("batch_1", "me", 5)


async def test_a_cancel_is_remembered(broker):
    assert not await broker.is_batch_cancelled("batch_1")
    await broker.cancel_batch("batch_1")
    assert await broker.is_batch_cancelled("batch_1")


async def test_the_first_answer_to_a_line_stays(broker):
    for number in range(1000):
        await broker.put_line("batch_1", number, f"line {number}".encode())
    await broker.put_line("batch_1", 5, b"another")
    lines = await broker.lines("batch_1")
    assert lines == {number: f"line {number}".encode() for number in range(1000)}
    assert await broker.lines("batch_2") == {}

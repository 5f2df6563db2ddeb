"""Files and batches, in memory and on Redis alike."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from service.queue.records import (
    ANSWERED_BADLY,
    ANSWERED_WELL,
    Batch,
    BatchError,
    BatchStatus,
    Move,
    MovedLines,
    OpenBatch,
    StoredFile,
)


def make_file(number: int, tenant: str = "t", **changes) -> StoredFile:
    fields = {"filename": "é.jsonl", "purpose": "batch", "num_bytes": 3, "created_s": 100.0 + number}
    return StoredFile(**{"file_id": f"file-{number}", "tenant": tenant, **fields, **changes})


def make_batch(number: int, tenant: str = "t", **changes) -> Batch:
    fields = {"endpoint": "/v1/completions", "input_file_id": "file-1", "expires_s": 900.0}
    return Batch(**{"batch_id": f"batch_{number}", "tenant": tenant, "created_s": 100.0 + number, **fields, **changes})


async def put(queue, file: StoredFile, *pieces: bytes) -> None:
    for number, piece in enumerate(pieces, 1):
        assert await queue.batches.append_file(file.file_id, file.tenant, piece) == number
    await queue.batches.put_file(file)


async def contents(queue, file_id: str) -> bytes:
    pieces = []
    while found := await queue.batches.file_pieces(file_id, len(pieces), 2):
        pieces += found
    return b"".join(pieces)


async def test_a_file_comes_back_whole(queue):
    data = bytes(range(256)) * 9000
    await put(queue, make_file(1), data[:1000], data[1000:2000], data[2000:])
    assert await queue.batches.get_file("file-1") == make_file(1)
    assert await contents(queue, "file-1") == data
    assert await queue.batches.file_pieces("file-1", 1, 1) == [data[1000:2000]]
    await queue.batches.put_file(make_file(2))
    assert await contents(queue, "file-2") == b""


async def test_a_tenant_sees_its_own_files_the_newest_first(queue):
    for number, tenant in enumerate("aba"):
        await put(queue, make_file(number, tenant), b"x")
    assert [file.file_id for file in await queue.batches.list_files("a")] == ["file-2", "file-0"]
    await queue.batches.drop_file("file-2", "a")
    assert [file.file_id for file in await queue.batches.list_files("a")] == ["file-0"]
    assert await queue.batches.get_file("file-2") is None
    assert await contents(queue, "file-2") == b""


@pytest.mark.parametrize("name", ["a/b", "", "x" * 200, "a:b", "{a}"])
async def test_an_id_that_no_key_may_hold_is_refused(queue, name):
    for asked in (queue.batches.get_file(name), queue.batches.file_pieces(name, 0, 1), queue.batches.get_batch(name)):
        with pytest.raises(ValueError, match="Redis key"):
            await asked


async def test_a_batch_is_open_until_it_ends(queue):
    for number in range(3):
        await queue.batches.put_batch(make_batch(number))
    assert await queue.batches.open_batches() == [OpenBatch(f"batch_{number}", "t") for number in range(3)]
    done = replace(
        make_batch(1),
        status=BatchStatus.FAILED,
        errors=(BatchError(code="c", message="m", line=3),),
        metadata={"k": "v"},
        at_s={"failed": 7.5},
    )
    await queue.batches.put_batch(done)
    assert await queue.batches.get_batch("batch_1") == done
    assert [each.batch_id for each in await queue.batches.open_batches()] == ["batch_0", "batch_2"]
    assert await ids(queue, None, 9) == ["batch_2", "batch_1", "batch_0"]
    assert await ids(queue, None, 2) == ["batch_2", "batch_1"]
    assert await ids(queue, "batch_1", 2) == ["batch_0"]
    assert await ids(queue, "batch_7", 2) == []
    assert await queue.batches.list_batches("other", None, 9) == []


async def ids(queue, after: str | None, count: int) -> list[str]:
    return [batch.batch_id for batch in await queue.batches.list_batches("t", after, count)]


async def test_one_holds_a_batch_at_a_time(queue):
    assert await queue.batches.hold_batch("batch_1", "me", 5)
    assert await queue.batches.hold_batch("batch_1", "me", 0.5)
    assert not await queue.batches.hold_batch("batch_1", "you", 0.5)
    await asyncio.sleep(0.6)
    assert await queue.batches.hold_batch("batch_1", "you", 5)
    assert not await queue.batches.hold_batch("batch_1", "me", 5)


async def test_a_cancel_is_remembered(queue):
    assert not await queue.batches.is_batch_cancelled("batch_1")
    await queue.batches.cancel_batch("batch_1")
    assert await queue.batches.is_batch_cancelled("batch_1")


async def test_the_first_answer_to_a_line_stays(queue):
    batch = make_batch(1)
    for number in range(0, 1000, 2):
        await queue.batches.put_line(
            batch, number, f"line {number}".encode(), ANSWERED_BADLY if number == 4 else ANSWERED_WELL
        )
    await queue.batches.put_line(batch, 6, b"another", ANSWERED_BADLY)
    marks = await queue.batches.line_marks("batch_1")
    assert (len(marks), marks[:8]) == (999, b"+\0+\0-\0+\0")
    assert await queue.batches.lines("batch_1", 3, 4) == [None, b"line 4", None, b"line 6"]
    assert await queue.batches.line_sizes("batch_1", 9, 3) == [0, 7, 0]
    assert await queue.batches.line_marks("batch_2") == b""
    assert await queue.batches.lines("batch_2", 0, 2) == [None, None]


async def test_answers_move_to_their_files_once(queue):
    batch = make_batch(1)
    for number in range(3):
        await queue.batches.put_line(batch, number, b"answer", ANSWERED_WELL)
    move = Move(
        first=0, past=2, num_bytes=12, output_file_id="file-o", error_file_id="file-e", output=b"one\n", errors=b"two\n"
    )
    assert await queue.batches.moved_lines("batch_1") == MovedLines()
    for _ in range(2):
        assert await queue.batches.move_lines(batch, move) == 2
    assert await queue.batches.moved_lines("batch_1") == MovedLines(2, 4, 4)
    assert (await contents(queue, "file-o"), await contents(queue, "file-e")) == (b"one\n", b"two\n")
    assert await queue.batches.lines("batch_1", 0, 3) == [None, None, b"answer"]
    await queue.batches.put_line(batch, 1, b"too late", ANSWERED_WELL)
    assert await queue.batches.lines("batch_1", 1, 1) == [None]
    await queue.batches.drop_lines(batch)
    assert await queue.batches.lines("batch_1", 2, 1) == [None]
    assert await queue.batches.line_marks("batch_1") == b"+++"

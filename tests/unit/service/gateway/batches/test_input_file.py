"""The lines of an input file, however it is split, and reading them again."""

from __future__ import annotations

import json
import random

import pytest

from service.gateway.batches import input_file
from service.gateway.batches.input_file import InputFile, LineScanner
from service.gateway.batches.lines import MAX_ERRORS, BadInput, read_line
from service.queue import records
from tests.fakes.queue.gateway import MemoryGatewayQueue

URL = "/v1/completions"


def row(name: object, **changes) -> bytes:
    return json.dumps(
        {"custom_id": str(name), "method": "POST", "url": URL, "body": {"prompt": "é"}, **changes}
    ).encode()


def scan(data: bytes, sizes: int | list[int] = 7, max_line_bytes: int = 1000, *, checks: bool = True) -> LineScanner:
    scanner, start = LineScanner(URL, max_line_bytes, checks=checks), 0
    while start < len(data):
        size = sizes if isinstance(sizes, int) else sizes.pop()
        scanner.feed(data[start : start + size])
        start += size
    scanner.finish()
    return scanner


def wrong(data: bytes, **how) -> list[tuple[str, int | None]]:
    with pytest.raises(BadInput) as caught:
        scan(data, **how)
    return [(error.message, error.line) for error in caught.value.errors]


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_requests_are_found_in_pieces_of_any_size(seed, checks):
    chance = random.Random(seed)
    rows = [row(number, body={"x": "y" * chance.randrange(300)}) for number in range(50)]
    fillings = [chance.choice([b"", b"\n", b"  \n\t\n", b" "]) for _ in rows]
    data = b"".join(filling + each + b"\n" for filling, each in zip(fillings, rows, strict=True))
    data = data if chance.random() < 0.5 else data[:-1]
    index = scan(data, [chance.randrange(1, 500) for _ in range(len(data))], checks=checks).index
    found = [data[start : start + length] for start, length in zip(index.starts, index.lengths, strict=True)]
    assert found == rows


@pytest.mark.parametrize("size", [1, 2, 500])
def test_a_byte_order_mark_precedes_the_first_line(size):
    """Editors and shells on Windows write one. It is no part of a later line."""
    index = scan(b"\xef\xbb\xbf" + row(1) + b"\r\n" + row(2), size).index
    assert list(index.starts) == [3, 3 + len(row(1)) + 2]
    assert wrong(row(1) + b"\n\xef\xbb\xbf" + row(2)) == [("The line is not a JSON object.", 2)]


def test_errors_name_their_lines():
    data = b"\n" + row(1) + b"\n\n{\n" + row(1) + b"\n" + row(2, method="GET")
    assert wrong(data) == [
        ("The line is not a JSON object.", 4),
        ("The custom_id was used in an earlier line.", 5),
        ("The method must be POST and the url /v1/completions.", 6),
    ]
    assert len(wrong(b"{\n" * 100)) == MAX_ERRORS


@pytest.mark.parametrize("size", [1, 64, 5000])
def test_a_line_that_is_too_long_is_reported_and_not_kept(size):
    data = row(1) + b"\n" + row(2, body={"x": "y" * 3000}) + b"\n" + row(3) + b"\n[]\n"
    assert wrong(data, sizes=size) == [
        ("The line is longer than 1000 bytes.", 2),
        ("The line is not a JSON object.", 4),
    ]
    scanner = LineScanner(URL, 1000)
    for _ in range(1000):
        scanner.feed(b"x" * 500)
        assert len(scanner._rest) <= 1000


@pytest.mark.parametrize(("data", "word"), [(b"", "no request"), (b"\n \n" * 100, "no request")])
def test_an_empty_file(data, word):
    ((message, _),) = wrong(data)
    assert word in message


def test_too_many_lines_end_the_reading_at_once(monkeypatch):
    monkeypatch.setattr(input_file, "MAX_LINES", 3)
    scanner = LineScanner(URL, 1000)
    with pytest.raises(BadInput, match=r".*") as caught:
        scanner.feed(b"".join(row(number) + b"\n" for number in range(9)))
    assert caught.value.errors[0].code == "too_many_requests"
    assert len(scanner.index) == 3


async def test_a_request_is_read_again_from_its_pieces(monkeypatch):
    monkeypatch.setattr(input_file, "PIECE_BYTES", 64)
    assert records.PIECE_BYTES > 64
    queue = MemoryGatewayQueue()
    rows = [row(number, body={"x": "y" * (number * 40)}) for number in range(9)]
    data = b"\n\n".join(rows)
    for start in range(0, len(data), 64):
        await queue.batches.append_file("file-1", "t", data[start : start + 64])
    file = InputFile(queue.batches, "file-1", scan(data).index)
    for number in (0, 1, 5, 8, 2):
        assert await file.row(number) == rows[number]
        assert read_line(await file.row(number)).custom_id == str(number)
    await queue.batches.drop_file("file-1", "t")
    with pytest.raises(BadInput):
        await file.row(3)
    await queue.close()

"""A batch's input file: indexes its lines and reads them from the queue in pieces."""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from service.gateway.batches.lines import MAX_ERRORS, MAX_LINES, BadInput, check_line
from service.gateway.openai.json_objects import encode_json
from service.queue.interface import BatchStore
from service.queue.records import PIECE_BYTES, BatchError

_ROW = re.compile(rb"\S[^\n]*")


@dataclass(frozen=True)
class LineIndex:
    """Offset and length of each line, 16 bytes per line."""

    starts: array[int] = field(default_factory=lambda: array("Q"))  # offsets in the file
    lengths: array[int] = field(default_factory=lambda: array("L"))  # in bytes

    def __len__(self) -> int:
        return len(self.starts)


class LineScanner:
    """Indexes the lines of a file that is fed in pieces, and checks them if `checks`."""

    def __init__(self, endpoint: str, max_line_bytes: int, *, checks: bool = True) -> None:
        self.index = LineIndex()
        self.num_id_bytes = 0  # of all custom_ids as JSON
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._checks = checks
        self._ids: set[int] = set()  # 64-bit hashes, salted per process
        self._errors: list[BatchError] = []
        self._rest = b""  # an incomplete line
        self._is_too_long = False  # `_rest` is
        self._offset = 0  # offset of `_rest` in the file
        self._number = 1  # line number of `_rest`

    def feed(self, piece: bytes) -> None:
        """Scan a piece. Raises BadInput after MAX_ERRORS errors."""
        data = self._rest + piece
        end = data.rfind(b"\n") + 1
        self._scan(data, end)
        self._rest = data[end:]
        self._offset += end
        if len(self._rest) > self._max_line_bytes:
            if not self._is_too_long:
                self._is_too_long = True
                self._wrong(self._number, self._too_long())
            self._offset += len(self._rest)
            self._rest = b""

    def finish(self) -> None:
        """Scan the remainder. Raises BadInput with all errors."""
        self._scan(self._rest, len(self._rest))
        if self._errors:
            raise BadInput(tuple(self._errors))
        if not self.index:
            raise BadInput((BatchError(code="empty_file", message="The file contains no request."),))

    def _scan(self, data: bytes, end: int) -> None:
        begin = counted = 0
        if self._is_too_long and end:
            begin = data.find(b"\n") + 1
            self._is_too_long = False
        elif self._offset == 0 and data.startswith(codecs.BOM_UTF8):
            begin = len(codecs.BOM_UTF8)
        for found in _ROW.finditer(data, begin, end):
            self._number += data.count(b"\n", counted, found.start())
            counted = found.start()
            self._add(found.start(), found.group())
        self._number += data.count(b"\n", counted, end)

    def _add(self, start: int, row: bytes) -> None:
        if len(self.index) == MAX_LINES:
            raise BadInput((BatchError(code="too_many_requests", message=f"More than {MAX_LINES} requests."),))
        self.index.starts.append(self._offset + start)
        self.index.lengths.append(len(row))
        if not self._checks:
            return
        try:
            if len(row) > self._max_line_bytes:
                raise ValueError(self._too_long())
            custom_id = check_line(row, self._endpoint)
            if hash(custom_id) in self._ids:
                raise ValueError("The custom_id was used in an earlier line.")
        except ValueError as error:
            self._wrong(self._number, str(error))
        else:
            self._ids.add(hash(custom_id))
            self.num_id_bytes += len(encode_json(custom_id))

    def _too_long(self) -> str:
        return f"The line is longer than {self._max_line_bytes} bytes."

    def _wrong(self, number: int, message: str) -> None:
        self._errors.append(BatchError(code="invalid_line", message=message, line=number))
        if len(self._errors) == MAX_ERRORS:
            raise BadInput(tuple(self._errors))


class InputFile:
    """Reads lines by number. Caches one piece, so reads in order are fastest."""

    def __init__(self, store: BatchStore, file_id: str, index: LineIndex) -> None:
        self.index = index
        self._store = store
        self._file_id = file_id
        self._cached = (-1, b"")  # (number, piece)

    async def row(self, number: int) -> bytes:
        """Return a line. Raises BadInput if the file was deleted, QueueUnavailable."""
        if number >= len(self.index):
            raise file_is_gone()
        start, length = self.index.starts[number], self.index.lengths[number]
        first, last = start // PIECE_BYTES, (start + length - 1) // PIECE_BYTES
        pieces = [await self._piece(piece) for piece in range(first, last + 1)]
        data = pieces[0] if first == last else b"".join(pieces)
        begin = start - first * PIECE_BYTES
        return data[begin : begin + length]

    async def _piece(self, number: int) -> bytes:
        cached, piece = self._cached
        if cached != number:
            found = await self._store.file_pieces(self._file_id, number, 1)
            if not found:
                raise file_is_gone()
            piece = found[0]
            self._cached = (number, piece)
        return piece


async def scan_file(store: BatchStore, file_id: str, scanner: LineScanner, run: Callable[..., Awaitable[Any]]) -> None:
    """Scan a whole file; `run` runs a function off the event loop. Raises BadInput, QueueUnavailable."""
    number = 0
    while pieces := await store.file_pieces(file_id, number, 1):
        await run(scanner.feed, pieces[0])
        number += 1
    if not number and await store.get_file(file_id) is None:
        raise file_is_gone()
    await run(scanner.finish)


def file_is_gone() -> BadInput:
    return BadInput((BatchError(code="file_not_found", message="The input file was deleted."),))

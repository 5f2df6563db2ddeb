"""Files and batches, in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.queue import keys
from service.queue.records import (
    LINE_OVERHEAD_BYTES,
    OVERHEAD_BYTES,
    UNLIMITED,
    Batch,
    Move,
    MovedLines,
    OpenBatch,
    StorageLimits,
    StoredFile,
    pack,
)
from tests.fakes.queue.ledger import MemoryLedger


@dataclass
class MemoryBatchData:
    """Files and batches that several queues share."""

    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    files: dict[str, StoredFile] = field(default_factory=dict)
    pieces: dict[str, list[bytes]] = field(default_factory=dict)
    unfinished: dict[str, float] = field(default_factory=dict)  # files that are being written, until when
    batches: dict[str, Batch] = field(default_factory=dict)
    holds: dict[str, tuple[str, float]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    lines: dict[str, dict[int, bytes]] = field(default_factory=dict)
    marks: dict[str, bytearray] = field(default_factory=dict)
    moved: dict[str, MovedLines] = field(default_factory=dict)


class MemoryBatchStore:
    """Implements BatchStore."""

    def __init__(self, batch_data: MemoryBatchData) -> None:
        self._batch_data = batch_data

    async def reserve_file(self, file_id: str, tenant: str, num_bytes: int, limits: StorageLimits) -> None:
        more = max(0, num_bytes - self._batch_data.ledger.taken(tenant, file_id))
        self._batch_data.ledger.charge(tenant, file_id, more, keys.UPLOAD_TTL_S, limits)

    async def append_file(
        self, file_id: str, tenant: str, data: bytes, limits: StorageLimits = UNLIMITED, *, is_reserved: bool = False
    ) -> int:
        keys.file_data(file_id)
        batch_data, now_s = self._batch_data, time.monotonic()
        for gone in [name for name, until_s in batch_data.unfinished.items() if until_s <= now_s]:
            del batch_data.unfinished[gone], batch_data.pieces[gone]
        batch_data.ledger.charge(tenant, file_id, 0 if is_reserved else len(data), keys.UPLOAD_TTL_S, limits)
        batch_data.unfinished[file_id] = now_s + keys.UPLOAD_TTL_S
        pieces = batch_data.pieces.setdefault(file_id, [])
        pieces.append(data)
        return len(pieces)

    async def put_file(self, file: StoredFile) -> None:
        batch_data = self._batch_data
        change = file.num_bytes + OVERHEAD_BYTES - batch_data.ledger.taken(file.tenant, file.file_id)
        batch_data.ledger.charge(file.tenant, file.file_id, change, keys.FILE_TTL_S)
        batch_data.unfinished.pop(file.file_id, None)
        batch_data.files[file.file_id] = file

    async def get_file(self, file_id: str) -> StoredFile | None:
        keys.file(file_id)
        return self._batch_data.files.get(file_id)

    async def file_pieces(self, file_id: str, first: int, count: int) -> Sequence[bytes]:
        keys.file(file_id)
        return self._batch_data.pieces.get(file_id, [])[first : first + count]

    async def list_files(self, tenant: str) -> Sequence[StoredFile]:
        return [file for file in reversed(self._batch_data.files.values()) if file.tenant == tenant]

    async def drop_file(self, file_id: str, tenant: str) -> None:
        for kept in (self._batch_data.files, self._batch_data.pieces, self._batch_data.unfinished):
            kept.pop(file_id, None)
        self._batch_data.ledger.release(tenant, file_id)

    async def put_batch(self, batch: Batch, limits: StorageLimits = UNLIMITED) -> None:
        batch_data = self._batch_data
        change = len(pack(batch)) + OVERHEAD_BYTES - batch_data.ledger.taken(batch.tenant, batch.batch_id)
        batch_data.ledger.charge(batch.tenant, batch.batch_id, change, keys.FILE_TTL_S, limits)
        batch_data.batches[batch.batch_id] = batch
        if not batch.is_open:
            batch_data.marks.pop(batch.batch_id, None)

    async def get_batch(self, batch_id: str) -> Batch | None:
        keys.batch(batch_id)
        return self._batch_data.batches.get(batch_id)

    async def list_batches(self, tenant: str, after: str | None, count: int) -> Sequence[Batch]:
        own = [batch for batch in reversed(self._batch_data.batches.values()) if batch.tenant == tenant]
        start = 0
        if after is not None:
            start = next((place for place, batch in enumerate(own, 1) if batch.batch_id == after), len(own))
        return own[start : start + count]

    async def open_batches(self) -> Sequence[OpenBatch]:
        return [OpenBatch(batch.batch_id, batch.tenant) for batch in self._batch_data.batches.values() if batch.is_open]

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        now_s = time.monotonic()
        owner, until_s = self._batch_data.holds.get(batch_id, (holder, 0.0))
        if owner != holder and until_s > now_s:
            return False
        self._batch_data.holds[batch_id] = (holder, now_s + for_s)
        return True

    async def cancel_batch(self, batch_id: str) -> None:
        self._batch_data.cancelled.add(batch_id)

    async def is_batch_cancelled(self, batch_id: str) -> bool:
        return batch_id in self._batch_data.cancelled

    async def reserve_lines(self, batch: Batch, num_bytes: int, limits: StorageLimits) -> None:
        ledger, name = self._batch_data.ledger, _lines_name(batch)
        more = max(0, num_bytes - ledger.taken(batch.tenant, name))
        ledger.charge(batch.tenant, name, more, keys.FILE_TTL_S, limits)

    async def put_line(
        self, batch: Batch, number: int, line: bytes, mark: bytes, limits: StorageLimits = UNLIMITED
    ) -> None:
        batch_data = self._batch_data
        marks = batch_data.marks.setdefault(batch.batch_id, bytearray())
        if number < batch_data.moved.get(batch.batch_id, MovedLines()).num_lines or (
            number < len(marks) and marks[number]
        ):
            return
        batch_data.ledger.charge(
            batch.tenant, _lines_name(batch), len(line) + LINE_OVERHEAD_BYTES, keys.FILE_TTL_S, limits
        )
        batch_data.lines.setdefault(batch.batch_id, {})[number] = line
        marks.extend(bytes(max(0, number + 1 - len(marks))))
        marks[number : number + 1] = mark

    async def line_marks(self, batch_id: str) -> bytes:
        return bytes(self._batch_data.marks.get(batch_id, b""))

    async def line_sizes(self, batch_id: str, first: int, count: int) -> Sequence[int]:
        return [len(line or b"") for line in await self.lines(batch_id, first, count)]

    async def lines(self, batch_id: str, first: int, count: int) -> Sequence[bytes | None]:
        lines = self._batch_data.lines.get(batch_id, {})
        return [lines.get(number) for number in range(first, first + count)]

    async def moved_lines(self, batch_id: str) -> MovedLines:
        return self._batch_data.moved.get(batch_id, MovedLines())

    async def move_lines(self, batch: Batch, move: Move) -> int:
        batch_data, moved = self._batch_data, await self.moved_lines(batch.batch_id)
        if moved.num_lines != move.first:
            return moved.num_lines
        for file_id, data in ((move.output_file_id, move.output), (move.error_file_id, move.errors)):
            if data:
                batch_data.pieces.setdefault(file_id, []).append(data)
                batch_data.ledger.charge(batch.tenant, file_id, len(data), keys.FILE_TTL_S)
        for number in range(move.first, move.past):
            batch_data.lines.get(batch.batch_id, {}).pop(number, None)
        batch_data.ledger.charge(batch.tenant, _lines_name(batch), -move.num_bytes, keys.FILE_TTL_S)
        batch_data.moved[batch.batch_id] = MovedLines(
            move.past, moved.output_bytes + len(move.output), moved.error_bytes + len(move.errors)
        )
        return move.past

    async def drop_lines(self, batch: Batch) -> None:
        self._batch_data.lines.pop(batch.batch_id, None)
        self._batch_data.ledger.release(batch.tenant, _lines_name(batch))


def _lines_name(batch: Batch) -> str:
    """Return the name of the batch's answers in its tenant's ledger."""
    return f"{batch.batch_id}.lines"

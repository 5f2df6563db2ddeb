"""Files and batches without Redis; nothing outlives the process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.wire import keys
from service.wire.batches import Batch, StoredFile


@dataclass
class MemoryShelf:
    """What several brokers in memory share."""

    files: dict[str, tuple[StoredFile, bytes]] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    holds: dict[str, tuple[str, float]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    lines: dict[str, dict[int, bytes]] = field(default_factory=dict)


class MemoryBatches:
    """Implements BatchStore."""

    def __init__(self, shelf: MemoryShelf):
        self._shelf = shelf

    async def put_file(self, file: StoredFile, data: bytes) -> None:
        self._shelf.files[file.file_id] = (file, data)

    async def file(self, file_id: str) -> StoredFile | None:
        keys.file(file_id)
        return self._shelf.files.get(file_id, (None, b""))[0]

    async def file_data(self, file_id: str) -> bytes:
        keys.file(file_id)
        return self._shelf.files.get(file_id, (None, b""))[1]

    async def files(self, tenant: str) -> Sequence[StoredFile]:
        return [file for file, _ in reversed(self._shelf.files.values()) if file.tenant == tenant]

    async def drop_file(self, file: StoredFile) -> None:
        self._shelf.files.pop(file.file_id, None)

    async def put_batch(self, batch: Batch) -> None:
        self._shelf.batches[batch.batch_id] = batch

    async def batch(self, batch_id: str) -> Batch | None:
        keys.batch(batch_id)
        return self._shelf.batches.get(batch_id)

    async def batches(self, tenant: str) -> Sequence[Batch]:
        return [batch for batch in reversed(self._shelf.batches.values()) if batch.tenant == tenant]

    async def open_batches(self) -> Sequence[str]:
        return [batch.batch_id for batch in self._shelf.batches.values() if batch.is_open]

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        now_s = time.monotonic()
        owner, until_s = self._shelf.holds.get(batch_id, (holder, 0.0))
        if owner != holder and until_s > now_s:
            return False
        self._shelf.holds[batch_id] = (holder, now_s + for_s)
        return True

    async def cancel_batch(self, batch_id: str) -> None:
        self._shelf.cancelled.add(batch_id)

    async def is_batch_cancelled(self, batch_id: str) -> bool:
        return batch_id in self._shelf.cancelled

    async def put_line(self, batch_id: str, number: int, line: bytes) -> None:
        self._shelf.lines.setdefault(batch_id, {}).setdefault(number, line)

    async def lines(self, batch_id: str) -> Mapping[int, bytes]:
        return dict(self._shelf.lines.get(batch_id, {}))

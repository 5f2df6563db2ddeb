"""Files and batches as the queue keeps them: what they are, and what a broker does with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec


class BatchStatus(StrEnum):
    """OpenAI's words. Those up to CANCELLING are open: some gateway has to see to the batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPEN = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING})


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    file_id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: float  # Redis time, Unix seconds


@dataclass(frozen=True, kw_only=True)
class BatchError:
    code: str
    message: str
    line: int | None = None  # of the input, from 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Written by its creator, then only by the gateway that holds it."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_s: float  # Redis time, Unix seconds
    expires_s: float
    status: BatchStatus = BatchStatus.VALIDATING
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchError, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    at_s: Mapping[str, float] = field(default_factory=dict)  # when it came to each status

    @property
    def is_open(self) -> bool:
        return self.status in OPEN


def pack(record: StoredFile | Batch) -> bytes:
    return msgspec.json.encode(record)


def unpack_file(packed: bytes) -> StoredFile:
    return msgspec.json.decode(packed, type=StoredFile)


def unpack_batch(packed: bytes) -> Batch:
    return msgspec.json.decode(packed, type=Batch)


class BatchStore(Protocol):
    """Part of DoorBroker. Everything is kept for FILE_TTL_S. Ids that no key may hold raise ValueError."""

    async def put_file(self, file: StoredFile, data: bytes) -> None:
        """The file is kept when this returns."""

    async def file(self, file_id: str) -> StoredFile | None: ...

    async def file_data(self, file_id: str) -> bytes:
        """All of it; nothing of a file that is not there."""

    async def files(self, tenant: str) -> Sequence[StoredFile]:
        """This tenant's, the newest first."""

    async def drop_file(self, file: StoredFile) -> None: ...

    async def put_batch(self, batch: Batch) -> None: ...

    async def batch(self, batch_id: str) -> Batch | None: ...

    async def batches(self, tenant: str) -> Sequence[Batch]:
        """This tenant's, the newest first."""

    async def open_batches(self) -> Sequence[str]:
        """Ids of everybody's batches that are open."""

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        """Whether the batch is this holder's for so long from now. One holder at a time; its own hold it renews."""

    async def cancel_batch(self, batch_id: str) -> None:
        """Remembered for whoever holds it."""

    async def is_batch_cancelled(self, batch_id: str) -> bool: ...

    async def put_line(self, batch_id: str, number: int, line: bytes) -> None:
        """The answer to a line of the input; the first one stays."""

    async def lines(self, batch_id: str) -> Mapping[int, bytes]: ...

"""Files and batches as the queue keeps them: what they are, and what a queue does with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from service.queue.storage import UNLIMITED, StorageLimits


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
    created_s: float  # queue time, Unix seconds


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
    created_s: float  # queue time, Unix seconds
    expires_s: float
    status: BatchStatus = BatchStatus.VALIDATING
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchError, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    ends_as: BatchStatus | None = None  # what becomes of it once its files are written
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


PIECE_BYTES = 256 << 10
"""A file is written and read in pieces, so that no single command keeps the queue from its other clients. Those of an
uploaded file have this size, but for the last: any part of it can be found."""
LINE_OVERHEAD_BYTES = 128
"""What an answer takes besides its text while it waits for the end of its batch."""
ANSWERED_WELL, ANSWERED_BADLY = b"+", b"-"
"""What stands for a line in the marks of its batch once it is answered; 0 before."""


@dataclass(frozen=True)
class OpenBatch:
    batch_id: str
    tenant: str


@dataclass(frozen=True)
class MovedLines:
    """How much of a batch's answers is in the files that it ends with."""

    num_lines: int = 0  # from the first on
    output_bytes: int = 0
    error_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Move:
    """Answers on their way to the files of their batch."""

    first: int
    past: int  # the line behind the last
    num_bytes: int  # what the answers were charged with
    output_file_id: str
    error_file_id: str
    output: bytes  # what the files get
    errors: bytes


class BatchStore(Protocol):
    """Part of GatewayQueue. Everything is kept for FILE_TTL_S and charged to its tenant. Ids that no key may hold raise
    ValueError."""

    async def reserve_file(self, file_id: str, tenant: str, num_bytes: int, limits: StorageLimits) -> None:
        """Charge a file that is about to be written, for UPLOAD_TTL_S. Raises StorageFull."""

    async def append_file(
        self, file_id: str, tenant: str, data: bytes, limits: StorageLimits = UNLIMITED, *, is_reserved: bool = False
    ) -> int:
        """Write one piece more of a file, charged unless it `is_reserved`; how many it has. It is gone UPLOAD_TTL_S
        after the last piece, unless `put_file` comes. Raises StorageFull."""

    async def put_file(self, file: StoredFile) -> None:
        """The file, whose pieces are written, is kept when this returns."""

    async def file(self, file_id: str) -> StoredFile | None: ...

    async def file_pieces(self, file_id: str, first: int, count: int) -> Sequence[bytes]:
        """Fewer than `count` at the end of the file, none of a file that is not there."""

    async def files(self, tenant: str) -> Sequence[StoredFile]:
        """This tenant's, the newest first."""

    async def drop_file(self, file_id: str, tenant: str) -> None:
        """Also one that is still being written."""

    async def put_batch(self, batch: Batch, limits: StorageLimits = UNLIMITED) -> None:
        """Raises StorageFull where limits are given: for a new one."""

    async def batch(self, batch_id: str) -> Batch | None: ...

    async def batches(self, tenant: str, after: str | None, count: int) -> Sequence[Batch]:
        """This tenant's, the newest first, `count` at most from behind `after` on."""

    async def open_batches(self) -> Sequence[OpenBatch]:
        """All tenants' batches that are open, the oldest first."""

    async def hold_batch(self, batch_id: str, holder: str, for_s: float) -> bool:
        """Whether the batch is this holder's for so long from now. One holder at a time; its own hold it renews."""

    async def cancel_batch(self, batch_id: str) -> None:
        """Remembered for whoever holds it."""

    async def is_batch_cancelled(self, batch_id: str) -> bool: ...

    async def reserve_lines(self, batch: Batch, num_bytes: int, limits: StorageLimits) -> None:
        """From now on the batch's answers are charged with `num_bytes` at least. Raises StorageFull."""

    async def put_line(
        self, batch: Batch, number: int, line: bytes, mark: bytes, limits: StorageLimits = UNLIMITED
    ) -> None:
        """The answer to a line of the input, ANSWERED_WELL or ANSWERED_BADLY; the first one stays. Raises
        StorageFull."""

    async def line_marks(self, batch_id: str) -> bytes:
        """A byte for each line, as far as the last that was answered."""

    async def line_sizes(self, batch_id: str, first: int, count: int) -> Sequence[int]:
        """Bytes of answers; 0 for those that are not there."""

    async def lines(self, batch_id: str, first: int, count: int) -> Sequence[bytes | None]: ...

    async def moved_lines(self, batch_id: str) -> MovedLines: ...

    async def move_lines(self, batch: Batch, move: Move) -> int:
        """Move answers to the files of their batch, in one atomic act, unless they were moved before; the first line
        that is not moved yet."""

    async def drop_lines(self, batch: Batch) -> None:
        """All answers are moved, and nothing is charged for them any more. To be called before the batch is put as
        ended."""

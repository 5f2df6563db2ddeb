"""Stored records of tenants. Times are queue time, Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from service.typed_decoding import decode_json

Json = dict[str, Any]

OVERHEAD_BYTES = 512
"""Charged per record, for key, list entries and ledger."""


@dataclass(frozen=True, kw_only=True)
class StorageLimits:
    """Limits of stored bytes; None: no limit."""

    max_bytes_per_tenant: int | None = None
    queue_share: float | None = None  # of its memory, reserved for jobs and events

    @property
    def max_record_bytes(self) -> int | None:
        """Limit for requests that outlive clients or are idempotent."""
        return None if self.max_bytes_per_tenant is None else self.max_bytes_per_tenant // 2

    @property
    def max_plain_record_bytes(self) -> int | None:
        """Limit for other requests, which have no record beyond it."""
        return None if self.max_bytes_per_tenant is None else self.max_bytes_per_tenant // 4


UNLIMITED = StorageLimits()


@dataclass(eq=False)
class StorageFull(Exception):
    """Nothing was stored: the tenant, or all tenants together, already use `num_bytes`."""

    of_tenant: bool
    num_bytes: int
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    file_id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: float


class BatchStatus(StrEnum):
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
class BatchError:
    code: str
    message: str
    line: int | None = None  # of the input, from 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch, written by its creator, then only by its holder."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_s: float
    expires_s: float
    status: BatchStatus = BatchStatus.VALIDATING
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchError, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    ends_as: BatchStatus | None = None  # once its files are written
    at_s: Mapping[str, float] = field(default_factory=dict)  # by status

    @property
    def is_open(self) -> bool:
        return self.status in OPEN


PIECE_BYTES = 256 << 10
"""Size of all pieces but an upload's last: small, so that no command blocks Redis for long."""
LINE_OVERHEAD_BYTES = 128
"""Charged per answer until its batch ends."""
ANSWERED_WELL, ANSWERED_BADLY = b"+", b"-"


@dataclass(frozen=True)
class OpenBatch:
    batch_id: str
    tenant: str


@dataclass(frozen=True)
class MovedLines:
    num_lines: int = 0
    output_bytes: int = 0
    error_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Move:
    first: int
    past: int  # line after the last
    num_bytes: int  # charged so far
    output_file_id: str
    error_file_id: str
    output: bytes
    errors: bytes


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    response_id: str
    tenant: str
    created_s: float
    answer: Json  # so far, or final
    context: list[Json] = field(default_factory=list)  # items that it continues, oldest first
    input: list[Json] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        return self.answer["status"] not in ("queued", "in_progress")


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """LoRA adapter that requests may name."""

    name: str
    path: str  # of its folder, for gateways and workers
    digest: str
    created_s: float


def pack(record: StoredFile | Batch) -> bytes:
    return msgspec.json.encode(record)


def unpack_file(packed: bytes) -> StoredFile:
    return decode_json(packed, StoredFile)


def unpack_batch(packed: bytes) -> Batch:
    return decode_json(packed, Batch)


def pack_response(record: StoredResponse) -> bytes:
    return msgspec.json.encode(record)


def unpack_response(packed: bytes) -> StoredResponse:
    return decode_json(packed, StoredResponse)


def pack_adapter(record: AdapterRecord) -> bytes:
    return msgspec.json.encode(record)


def unpack_adapter(packed: bytes) -> AdapterRecord:
    return decode_json(packed, AdapterRecord)

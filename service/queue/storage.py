"""How much a tenant may store: files, batches and their answers, responses, records of requests."""

from __future__ import annotations

from dataclasses import dataclass

OVERHEAD_BYTES = 512
"""What a stored thing takes besides its contents: its key, its place in lists and in the ledger."""


@dataclass(frozen=True, kw_only=True)
class StorageLimits:
    """None: no bound."""

    max_bytes_per_tenant: int | None = None
    queue_share: float | None = None  # of the queue's memory: left to jobs and events, taken by nothing that is stored

    @property
    def max_record_bytes(self) -> int | None:
        """Of a tenant's requests that go on without their clients, or are found by an idempotency key."""
        return None if self.max_bytes_per_tenant is None else self.max_bytes_per_tenant // 2

    @property
    def max_plain_record_bytes(self) -> int | None:
        """The part of it that records of all other requests may take: without them no request fails."""
        return None if self.max_bytes_per_tenant is None else self.max_bytes_per_tenant // 4


UNLIMITED = StorageLimits()


@dataclass(eq=False)
class StorageFull(Exception):
    """Nothing was stored. `num_bytes` are stored already, of the tenant or in all."""

    of_tenant: bool
    num_bytes: int
    max_bytes: int

"""What is charged to a tenant on Redis: the arguments of `ledger.lua`, and what its scripts answer."""

from __future__ import annotations

from collections.abc import Sequence

from service.queue import keys
from service.queue.storage import StorageFull, StorageLimits


def stored_keys(tenant: str) -> tuple[str, str]:
    return keys.stored(tenant), keys.stored_bytes(tenant)


def record_keys(tenant: str) -> tuple[str, str]:
    return keys.records(tenant), keys.record_bytes(tenant)


def charge_args(name: str, num_bytes: int, for_s: float, limits: StorageLimits) -> tuple[str | int | float, ...]:
    """ARGV[9] to ARGV[13]."""
    quota, share = limits.max_bytes_per_tenant, limits.queue_share
    return (
        name,
        num_bytes,
        life_ms(for_s),
        "" if quota is None else quota,
        "" if share is None else share,
    )


def life_ms(for_s: float) -> int:
    return max(1, int(for_s * 1000))


def checked(answer: Sequence[int]) -> Sequence[int]:
    """Raises StorageFull for an answer that says so."""
    if answer[0] in (-1, -2):
        raise StorageFull(of_tenant=answer[0] == -1, num_bytes=answer[1], max_bytes=answer[2])
    return answer

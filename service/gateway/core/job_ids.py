"""Ids of requests and their jobs: by chance, or the same from wherever they are asked for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import sha256

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_job_id() -> str:
    """26 characters of Crockford's base 32, 128 bits of chance: nobody guesses another's job."""
    return _in_base_32(secrets.randbits(128))


def job_id_of(*names: str) -> str:
    """Of these names, the same wherever it is asked for."""
    return _in_base_32(int.from_bytes(sha256("\0".join(names).encode()).digest()[:16]))


def seed_of(request_id: str) -> int:
    """The seed of a request that came without one, the same wherever it is admitted."""
    return int.from_bytes(sha256(b"seed" + request_id.encode()).digest()[:8])


def job_names(request_id: str, num_jobs: int) -> Sequence[str]:
    """The ids of a request's jobs; the first is its own."""
    return [request_id, *(f"{request_id}.{number}" for number in range(1, num_jobs))]


def _in_base_32(bits: int) -> str:
    return "".join(CROCKFORD[(bits >> shift) & 31] for shift in range(125, -1, -5))

"""Digests of a prompt's prefixes, by which `claim.lua` finds the worker that computed them before.

A table of NUM_SLOTS places maps digests to workers: a new entry replaces an old one, so it never grows.
"""

from __future__ import annotations

from hashlib import blake2b

from service.queue.messages import Job

STRIDE_BYTES = 4 * 64
"""A prefix counts in steps of 64 tokens, uint32 each."""
NUM_STEPS = 32
MAX_PREFIX_BYTES = 4 << 17
NUM_SLOTS = 1 << 17
DIGEST_BYTES = 8
"""Three of the slot, five to compare."""

KEEP_S = 0.03
"""Time for which a waiting job is left to a better worker: the one with its prefix, or a less busy one."""
MAX_RATIO = 1.5
MAX_HELD = 8
"""The worker with the prefix may hold MAX_HELD branches more than MAX_RATIO times those of the least busy one."""


def prefix_digests(job: Job) -> bytes:
    """Return DIGEST_BYTES for each prefix of 64, 128, ..., 2048, 4096, 8192, ... tokens; of one tenant, salt and
    adapter."""
    adapter = "" if job.adapter is None else f"{job.adapter.digest}\0"
    digest = blake2b(f"{job.tenant}\0{job.cache_salt}\0{adapter}".encode(), digest_size=DIGEST_BYTES)
    found, start, end = [], 0, STRIDE_BYTES
    while end <= min(len(job.prompt), MAX_PREFIX_BYTES):
        digest.update(memoryview(job.prompt)[start:end])
        value = digest.copy().digest()
        slot = int.from_bytes(value[:3]) % NUM_SLOTS
        found.append(slot.to_bytes(3) + value[3:])
        start, end = end, end + STRIDE_BYTES if end < NUM_STEPS * STRIDE_BYTES else 2 * end
    return b"".join(found)

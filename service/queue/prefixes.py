"""Digests of a prompt's prefixes, by which `claim.lua` finds the worker that has them cached. New entries replace old
ones."""

from __future__ import annotations

from hashlib import blake2b

from service.queue.messages import Job

STRIDE_BYTES = 4 * 64  # tokens are uint32
NUM_STEPS = 32
MAX_PREFIX_BYTES = 4 << 17
NUM_SLOTS = 1 << 17
DIGEST_BYTES = 8
"""Three bytes for the slot, five to compare."""

KEEP_S = 0.03
"""Time for which a waiting job is left to a better worker."""
MAX_RATIO = 1.5
MAX_HELD = 8
"""Maximum branches of a worker with the prefix: MAX_HELD + MAX_RATIO * the least busy worker's."""


def prefix_digests(job: Job) -> bytes:
    """Return DIGEST_BYTES for each prefix of 64, 128, ..., 2048, 4096, 8192, ... tokens."""
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

from __future__ import annotations

from service.queue.messages import Job

NORMAL, BATCH = LANES = ("normal", "batch")
AGE_S = 10.0
BATCH_AGE_S = 60.0
RECLAIM_AFTER_S = 0.025
"""Wait for a free slot at another worker before reclaiming an over share."""
EXPECTED_OUTPUT_TOKENS = 1024
"""Most branches end long before `max_tokens`."""


def cost_of(job: Job) -> int:
    """Return the job's estimated tokens."""
    return len(job.prompt) // 4 + branches_of(job) * min(job.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)


def branches_of(job: Job) -> int:
    """Return the number of sequences."""
    beam = job.sampling.beam
    return beam.width if beam is not None else job.sampling.best_of


def lane_of(job: Job) -> str:
    return BATCH if job.is_batch else NORMAL

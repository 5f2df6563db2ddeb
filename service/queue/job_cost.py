"""What a job costs, and the lanes and times by which `fair.lua` orders waiting jobs."""

from __future__ import annotations

from service.queue.messages import Job

NORMAL, BATCH = LANES = ("normal", "batch")
AGE_S = 10.0
BATCH_AGE_S = 60.0
RECLAIM_AFTER_S = 0.025
"""So long a new job waits for a free place, where there are several workers, before one takes back what it has lent."""
EXPECTED_OUTPUT_TOKENS = 1024
"""A branch counts for no more before it has run: most end long before what they are allowed."""


def cost_of(job: Job) -> int:
    """Tokens that a job counts for, where tenants share the fleet and the queue is bounded."""
    return len(job.prompt) // 4 + branches_of(job) * min(job.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)


def branches_of(job: Job) -> int:
    """How many of the sequences that an engine runs at once the job takes."""
    beam = job.sampling.beam
    return beam.width if beam is not None else job.sampling.best_of


def lane_of(job: Job) -> str:
    return BATCH if job.is_batch else NORMAL

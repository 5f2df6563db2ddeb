"""Times of claims as the worker's histograms count them."""

from __future__ import annotations

from service.engine.request import RequestTimes
from service.observability.worker_metrics import JOBS, WORKER_HISTOGRAMS, read_stats
from service.worker.job_counts import ClaimTimes, JobCounts


def ended(attempt: int = 1, **times) -> dict[str, tuple[int, float]]:
    """Count and sum of each histogram after one job."""
    counts = JobCounts()
    request = RequestTimes(**{"started_s": 103.0, "first_token_s": 103.5, "ended_s": 107.0, **times})
    counts.observe_end(ClaimTimes(attempt=attempt, queued_s=4.0, request=request, claimed_s=101.0))
    stats = read_stats(JOBS, counts)
    return {
        each.stat: (each.cumulative(stats)[-1][1], stats[f"{each.stat}_sum"])
        for each in WORKER_HISTOGRAMS
        if each.source == JOBS
    }


def test_a_job_waits_is_prefilled_and_runs():
    assert ended() == {"queue_time_s": (1, 6.0), "prefill_time_s": (1, 0.5), "inference_time_s": (1, 4.0)}


def test_a_later_claim_has_no_queue_time_and_a_failed_one_only_what_it_reached():
    assert ended(attempt=2)["queue_time_s"] == (0, 0.0)
    assert ended(first_token_s=0.0)["prefill_time_s"] == (0, 0.0)
    assert ended(first_token_s=0.0)["inference_time_s"] == (1, 4.0)
    assert set(ended(started_s=0.0).values()) == {(0, 0.0)}


def test_a_clock_that_was_set_back_gives_no_negative_times():
    assert ended(started_s=100.0, first_token_s=99.0, ended_s=98.0) == {
        "queue_time_s": (1, 4.0),
        "prefill_time_s": (1, 0.0),
        "inference_time_s": (1, 0.0),
    }

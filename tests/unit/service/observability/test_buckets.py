"""A worker's histograms on their way: counted, sent in a card, exposed."""

from __future__ import annotations

from itertools import accumulate

import pytest

from service.observability.buckets import STEP_TOKEN_BUCKETS, Buckets
from service.observability.metrics import GatewayMetrics
from service.observability.worker_metrics import WORKER_HISTOGRAMS
from service.queue.codec import LIMITS, decode, encode
from service.queue.messages import WorkerCard
from tests.unit.service.observability.test_metrics import find, samples

OBSERVED = (0, 1, 2, 8, 9, 16384, 16385)


def counted() -> Buckets:
    buckets = Buckets(STEP_TOKEN_BUCKETS)
    for value in OBSERVED:
        buckets.observe(value)
    return buckets


def test_a_value_belongs_to_the_first_bound_that_it_does_not_exceed():
    buckets = counted()
    below = [sum(value <= bound for value in OBSERVED) for bound in (*STEP_TOKEN_BUCKETS, float("inf"))]
    assert list(accumulate(buckets.values[:-1])) == below
    assert buckets.values[-1] == sum(OBSERVED)


def test_a_card_carries_it_and_metrics_have_vllms_name_and_bounds():
    (histogram,) = (each for each in WORKER_HISTOGRAMS if each.stat == "iteration_tokens")
    stats = histogram.entries(counted().values)
    assert len(stats) == 6  # what was not observed is not sent
    fields = {"worker_id": "w1", "model": "m", "ready": True, "max_model_len": 1, "num_blocks": 1, "block_size": 16}
    card = decode(WorkerCard, encode(WorkerCard(**fields, beat_at_s=1.0, stats=stats)))
    page = GatewayMetrics("m")
    page.set_fleet({"w1": card.stats, "older": {"steps_total": 3.0}}, {}, 0)
    own = {"model_name": "m", "engine": "w1"}
    assert find(page, "vllm:iteration_tokens_total_bucket", **own, le="8.0") == 4
    assert find(page, "vllm:iteration_tokens_total_bucket", **own, le="16384.0") == 6
    assert find(page, "vllm:iteration_tokens_total_count", **own) == 7
    assert find(page, "vllm:iteration_tokens_total_sum", **own) == sum(OBSERVED)
    names = {name for name, *labels in samples(page) if ("engine", "older") in labels}
    assert names == {"quire:steps_total"}  # an earlier version counts no histograms


def test_a_full_card_is_within_its_limit():
    entries = sum(len(each.bounds) + 2 for each in WORKER_HISTOGRAMS)
    assert entries < LIMITS[WorkerCard].max_map_len // 4


@pytest.mark.parametrize("name", ["queue", "prefill", "inference"])
def test_times_of_requests_have_vllms_names(name):
    assert f"vllm:request_{name}_time_seconds" in {each.name for each in WORKER_HISTOGRAMS}

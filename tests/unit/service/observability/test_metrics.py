"""Metrics as Prometheus reads them."""

import math

from prometheus_client.parser import text_string_to_metric_families

from service.engine.stats import EngineStats
from service.errors import EndReason
from service.observability.metrics import GatewayMetrics, LaneStats
from service.observability.worker_metrics import ENGINE, JOBS, WORKER_METRICS, AdapterLabels, WorkerFormats
from service.worker.job_counts import JobCounts


def samples(gateway_metrics):
    """Every sample by name and labels."""
    families = text_string_to_metric_families(gateway_metrics.exposition().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def find(gateway_metrics, name, **labels):
    return samples(gateway_metrics)[(name, *sorted(labels.items()))]


MINE = {"model_name": "m", "engine": "gateway"}


def test_request_that_ends_well():
    page = GatewayMetrics("m")
    timer = page.track_request(30, 16, 2)
    assert find(page, "quire:open_requests") == 1
    for num_tokens in (1, 2, 0, 1):
        timer.observe_tokens(num_tokens)
    timer.observe_end(EndReason.STOP, 3)
    assert find(page, "quire:open_requests") == 0
    assert find(page, "vllm:request_max_num_generation_tokens_sum", **MINE) == 3
    assert find(page, "vllm:time_to_first_token_seconds_count", **MINE) == 1
    assert find(page, "vllm:inter_token_latency_seconds_count", **MINE) == 2
    assert find(page, "vllm:e2e_request_latency_seconds_count", **MINE) == 1
    assert find(page, "vllm:request_prompt_tokens_sum", **MINE) == 30
    assert find(page, "vllm:request_generation_tokens_sum", **MINE) == 4
    assert find(page, "vllm:request_success_total", **MINE, finished_reason="stop") == 1
    assert find(page, "quire:requests_ended_total", reason="stop") == 1


def test_every_end_has_its_label():
    page = GatewayMetrics("m")
    for reason in EndReason:
        page.track_request(1, 16).observe_end(reason)
        assert find(page, "quire:requests_ended_total", reason=reason.value) == 1
    successes = {key: value for key, value in samples(page).items() if key[0] == "vllm:request_success_total"}
    assert sum(successes.values()) == 3
    assert find(page, "vllm:request_success_total", **MINE, finished_reason="abort") == 1


GPU, HOST = {"tier": "gpu"}, {"tier": "host"}
NUMBERS = {
    "num_running": (3, "vllm:num_requests_running", {}),
    "num_waiting": (4, "vllm:num_requests_waiting", {}),
    "num_blocks_free": (5, "quire:kv_blocks", {**GPU, "state": "free"}),
    "num_blocks_used": (6, "quire:kv_blocks", {**GPU, "state": "used"}),
    "num_blocks_shared": (2, "quire:kv_blocks", {**GPU, "state": "shared"}),
    "num_blocks_cached": (7, "quire:kv_blocks", {**GPU, "state": "cached"}),
    "num_host_blocks_free": (21, "quire:kv_blocks", {**HOST, "state": "free"}),
    "num_host_blocks_used": (22, "quire:kv_blocks", {**HOST, "state": "used"}),
    "num_host_blocks_cached": (23, "quire:kv_blocks", {**HOST, "state": "cached"}),
    "swapped_total": (24, "quire:preemptions_total", {"kind": "swap"}),
    "recomputed_total": (25, "quire:preemptions_total", {"kind": "recompute"}),
    "reclaimed_total": (31, "quire:reclaimed_total", {}),
    "swap_out_bytes_total": (26, "quire:kv_swap_bytes_total", {"direction": "out"}),
    "swap_in_bytes_total": (27, "quire:kv_swap_bytes_total", {"direction": "in"}),
    "copy_on_write_total": (28, "quire:kv_copy_on_write_total", {}),
    "prefix_query_tokens_total": (29, "quire:prefix_cache_query_tokens_total", {}),
    "prefix_hit_tokens_total": (30, "quire:prefix_cache_hit_tokens_total", {}),
    "resumed_total": (32, "quire:resumed_total", {}),
    "recomputed_tokens_total": (33, "quire:recomputed_tokens_total", {}),
    "recompute_s_total": (3.5, "quire:recompute_seconds_total", {}),
    "swap_out_s_total": (1.5, "quire:kv_swap_seconds_total", {"direction": "out"}),
    "swap_in_s_total": (2.5, "quire:kv_swap_seconds_total", {"direction": "in"}),
    "num_jobs_held": (34, "quire:jobs_held", {}),
    "jobs_taken_over_total": (35, "quire:jobs_taken_over_total", {}),
    "jobs_lost_total": (36, "quire:jobs_lost_total", {}),
    "kv_usage": (0.5, "vllm:kv_cache_usage_perc", {}),
    "kv_waste_ratio": (0.1, "quire:kv_waste_ratio", {}),
    "prompt_tokens_total": (70, "vllm:prompt_tokens_total", {}),
    "generation_tokens_total": (80, "vllm:generation_tokens_total", {}),
    "preemptions_total": (9, "vllm:num_preemptions_total", {}),
    "steps_total": (10, "quire:steps_total", {}),
    "step_time_ms": (11.5, "quire:step_time_ms", {}),
    "drafts_total": (51, "vllm:spec_decode_num_drafts_total", {}),
    "draft_tokens_total": (52, "vllm:spec_decode_num_draft_tokens_total", {}),
    "accepted_tokens_total": (53, "vllm:spec_decode_num_accepted_tokens_total", {}),
    "mean_draft_length": (1.5, "quire:spec_decode_mean_draft_length", {}),
    **{
        f"accepted_tokens_total_{at}": (
            60 + at,
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            {"position": str(at)},
        )
        for at in range(16)
    },
    **{
        f"{outcome}_tokens_total_{source}": (
            80 + len(outcome) + len(source),
            f"quire:spec_decode_{outcome}_tokens_total",
            {"source": source},
        )
        for outcome in ("drafted", "accepted")
        for source in ("grammar", "ngram", "suffix", "eagle3", "draft_model")
    },
}
"""A statistic of a worker, with its value and its line in the exposition."""


def test_numbers_of_the_workers():
    page = GatewayMetrics("m")
    stats = {stat: value for stat, (value, _, _) in NUMBERS.items()}
    page.set_fleet({"w1": {**stats, "something new": 1}, "w2": {"num_running": 1}}, {}, 2)
    for value, name, labels in NUMBERS.values():
        assert find(page, name, model_name="m", engine="w1", **labels) == value, name
    assert find(page, "vllm:num_requests_running", model_name="m", engine="w2") == 1
    assert find(page, "quire:leases") == 2
    assert find(page, "vllm:prefix_cache_queries_total", model_name="m", engine="w1") == 29
    assert find(page, "vllm:prefix_cache_hits_total", model_name="m", engine="w1") == 30
    page.set_fleet({}, {}, math.nan)
    assert not any(("engine", "w1") in key for key in samples(page))


def test_every_number_of_a_worker_is_exported():
    assert set(NUMBERS) == {metric.stat for metric in WORKER_METRICS}


def test_the_queue_by_lane():
    page = GatewayMetrics("m")
    page.set_fleet({}, {"normal": LaneStats(3, 1.5), "batch": LaneStats(0, 0.0)}, 1)
    assert find(page, "quire:queue_depth") == find(page, "quire:queue_lane_depth", lane="normal") == 3
    assert find(page, "quire:queue_oldest_wait_seconds", lane="normal") == 1.5
    assert (
        find(page, "quire:queue_lane_depth", lane="batch")
        == find(page, "quire:queue_oldest_wait_seconds", lane="batch")
        == 0
    )
    page.set_fleet({}, {"normal": LaneStats(math.nan, math.nan)}, math.nan)
    for name, labels in (
        ("queue_depth", {}),
        ("queue_lane_depth", {"lane": "normal"}),
        ("queue_oldest_wait_seconds", {"lane": "normal"}),
        ("leases", {}),
    ):
        assert math.isnan(find(page, f"quire:{name}", **labels))


def test_responses_by_route():
    page = GatewayMetrics("m")
    page.count_response("/v1/models/{model}", 404)
    page.count_response("/v1/models/{model}", 404)
    assert find(page, "quire:http_responses_total", route="/v1/models/{model}", status="404") == 2


def test_two_pages_share_nothing():
    one, other = GatewayMetrics("a"), GatewayMetrics("b")
    one.track_request(1, 16).observe_end(EndReason.STOP)
    assert find(other, "quire:requests_ended_total", reason="stop") == 0


def test_every_statistic_has_its_source():
    assert {metric.attribute for metric in WORKER_METRICS if metric.source == ENGINE} <= set(dir(EngineStats))
    assert {metric.attribute for metric in WORKER_METRICS if metric.source == JOBS} <= set(dir(JobCounts))
    assert {metric.source for metric in WORKER_METRICS} == {ENGINE, JOBS}


def test_histograms_of_requests_that_dashboards_ask_for():
    page = GatewayMetrics("m")
    timer = page.track_request(30, 16, 2)
    for _ in range(3):
        timer.observe_tokens(1)
    timer.observe_end(EndReason.STOP)
    text = page.exposition().decode()
    for name in ("decode_time_seconds", "time_per_output_token_seconds", "params_max_tokens", "params_n"):
        assert f'vllm:request_{name}_count{{engine="gateway",model_name="m"}} 1.0' in text
    assert 'vllm:request_params_n_sum{engine="gateway",model_name="m"} 2.0' in text


def test_what_workers_hold():
    page = GatewayMetrics("m")
    formats = {"w1": WorkerFormats("compressed-tensors float-quantized", 9_150_000_000, "fp8_e4m3", 16, 1 << 20, 3000)}
    page.set_fleet({}, {}, 0, formats)
    own = {"model_name": "m", "engine": "w1"}
    cache = {"block_size": "16", "cache_dtype": "fp8_e4m3", "num_gpu_blocks": "3000", "block_bytes": "1048576"}
    assert find(page, "vllm:cache_config_info", **own, **cache) == 1
    assert find(page, "quire:weight_bytes", **own, format="compressed-tensors float-quantized") == 9.15e9
    page.set_fleet({}, {}, 0)
    assert not any(name == "quire:weight_bytes" for name, *_ in samples(page))


def test_adapters_of_each_worker_as_vllm_names_them():
    page = GatewayMetrics("demo")
    page.set_fleet({}, {}, 0, None, {"w1": AdapterLabels("4", "sql,talk", "")})
    labels = {"engine": "w1", "max_lora": "4", "running_lora_adapters": "sql,talk", "waiting_lora_adapters": ""}
    assert find(page, "vllm:lora_requests_info", model_name="demo", **labels) > 1e9  # the time, as in vLLM
    page.set_fleet({}, {}, 0)
    assert b"lora_requests_info" not in page.exposition()

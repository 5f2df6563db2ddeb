"""Every metric: vLLM's names and labels if the meaning is the same, else `quire:`.

Workers send `WorkerCard.stats`, named below; the gateway re-exports them with `engine` = worker id. A worker's counters
start at 0 with its process, as Prometheus expects.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.errors import EndReason

# Names in WorkerCard.stats
STAT_NUM_RUNNING = "num_running"
STAT_NUM_WAITING = "num_waiting"
STAT_NUM_BLOCKS_FREE = "num_blocks_free"
STAT_NUM_BLOCKS_USED = "num_blocks_used"  # by one sequence
STAT_NUM_BLOCKS_SHARED = "num_blocks_shared"  # by several sequences
STAT_NUM_BLOCKS_CACHED = "num_blocks_cached"
STAT_NUM_HOST_BLOCKS_FREE = "num_host_blocks_free"
STAT_NUM_HOST_BLOCKS_USED = "num_host_blocks_used"
STAT_NUM_HOST_BLOCKS_CACHED = "num_host_blocks_cached"
STAT_KV_USAGE = "kv_usage"  # 0..1
STAT_KV_WASTE_RATIO = "kv_waste_ratio"  # 0..1, empty token slots of used blocks
STAT_PROMPT_TOKENS_TOTAL = "prompt_tokens_total"
STAT_GENERATION_TOKENS_TOTAL = "generation_tokens_total"
STAT_PREEMPTIONS_TOTAL = "preemptions_total"
STAT_SWAPPED_TOTAL = "swapped_total"
STAT_RECOMPUTED_TOTAL = "recomputed_total"
STAT_RECLAIMED_TOTAL = "reclaimed_total"
STAT_RECOMPUTED_TOKENS_TOTAL = "recomputed_tokens_total"
STAT_RECOMPUTE_S_TOTAL = "recompute_s_total"
STAT_SWAP_OUT_BYTES_TOTAL = "swap_out_bytes_total"
STAT_SWAP_IN_BYTES_TOTAL = "swap_in_bytes_total"
STAT_SWAP_OUT_S_TOTAL = "swap_out_s_total"
STAT_SWAP_IN_S_TOTAL = "swap_in_s_total"
STAT_COPY_ON_WRITE_TOTAL = "copy_on_write_total"
STAT_PREFIX_QUERY_TOKENS_TOTAL = "prefix_query_tokens_total"
STAT_PREFIX_HIT_TOKENS_TOTAL = "prefix_hit_tokens_total"
STAT_RESUMED_TOTAL = "resumed_total"
STAT_NUM_JOBS_HELD = "num_jobs_held"  # claimed and not ended
STAT_JOBS_TAKEN_OVER_TOTAL = "jobs_taken_over_total"
STAT_JOBS_LOST_TOTAL = "jobs_lost_total"
STAT_STEPS_TOTAL = "steps_total"
STAT_STEP_TIME_MS = "step_time_ms"  # of the last step

# Names that `quire top` reads from the exposition
FIRST_TOKEN_S = "vllm:time_to_first_token_seconds"
NEXT_TOKEN_S = "vllm:inter_token_latency_seconds"
NUM_RUNNING = "vllm:num_requests_running"
NUM_WAITING = "vllm:num_requests_waiting"
PROMPT_TOKENS = "vllm:prompt_tokens"
GENERATION_TOKENS = "vllm:generation_tokens"
PREEMPTIONS = "vllm:num_preemptions"
REQUESTS_ENDED = "quire:requests_ended"
OPEN_REQUESTS = "quire:open_requests"
QUEUE_DEPTH = "quire:queue_depth"
QUEUE_LANE_DEPTH = "quire:queue_lane_depth"
QUEUE_OLDEST_WAIT_S = "quire:queue_oldest_wait_seconds"
KV_BLOCKS = "quire:kv_blocks"
KV_WASTE_RATIO = "quire:kv_waste_ratio"
STEPS = "quire:steps"
STEP_TIME_MS = "quire:step_time_ms"

PREEMPTIONS_HELP = "Preempted requests, by how they are restored."
SWAP_HELP = "Bytes of KV blocks copied to and from host memory."
SWAP_TIME_HELP = "Seconds of these copies; they overlap with steps."
PREFIX_QUERIES_HELP = "Prompt tokens looked up in the prefix cache."
PREFIX_HITS_HELP = "Prompt tokens found in the prefix cache."

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GATEWAY = "gateway"
"""Label `engine` of what a gateway measures."""


@dataclass(frozen=True)
class _WorkerMetric:
    """Exported form of an entry of WorkerCard.stats."""

    name: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()


def _kv_blocks(tier: str, state: str) -> _WorkerMetric:
    help = "KV blocks: free, used by one sequence, shared by several, or cached for later prompts."
    return _WorkerMetric(KV_BLOCKS, help, (("tier", tier), ("state", state)))


_WORKER_GAUGES: Mapping[str, _WorkerMetric] = {
    STAT_NUM_RUNNING: _WorkerMetric(NUM_RUNNING, "Running requests."),
    STAT_NUM_WAITING: _WorkerMetric(NUM_WAITING, "Requests waiting in the engine."),
    STAT_KV_USAGE: _WorkerMetric("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0..1."),
    STAT_KV_WASTE_RATIO: _WorkerMetric(KV_WASTE_RATIO, "Share of the used blocks' token slots that are empty, 0..1."),
    STAT_NUM_BLOCKS_FREE: _kv_blocks("gpu", "free"),
    STAT_NUM_BLOCKS_USED: _kv_blocks("gpu", "used"),
    STAT_NUM_BLOCKS_SHARED: _kv_blocks("gpu", "shared"),
    STAT_NUM_BLOCKS_CACHED: _kv_blocks("gpu", "cached"),
    STAT_NUM_HOST_BLOCKS_FREE: _kv_blocks("host", "free"),
    STAT_NUM_HOST_BLOCKS_USED: _kv_blocks("host", "used"),
    STAT_NUM_HOST_BLOCKS_CACHED: _kv_blocks("host", "cached"),
    STAT_STEP_TIME_MS: _WorkerMetric(STEP_TIME_MS, "Duration of the last step, milliseconds."),
    STAT_NUM_JOBS_HELD: _WorkerMetric("quire:jobs_held", "Jobs claimed by the worker, under its lease."),
}
_WORKER_COUNTERS: Mapping[str, _WorkerMetric] = {
    STAT_PROMPT_TOKENS_TOTAL: _WorkerMetric(PROMPT_TOKENS, "Prompt tokens computed."),
    STAT_GENERATION_TOKENS_TOTAL: _WorkerMetric(GENERATION_TOKENS, "Tokens generated."),
    STAT_PREEMPTIONS_TOTAL: _WorkerMetric(PREEMPTIONS, "Preempted requests."),
    STAT_SWAPPED_TOTAL: _WorkerMetric("quire:preemptions", PREEMPTIONS_HELP, (("kind", "swap"),)),
    STAT_RECOMPUTED_TOTAL: _WorkerMetric("quire:preemptions", PREEMPTIONS_HELP, (("kind", "recompute"),)),
    STAT_RECLAIMED_TOTAL: _WorkerMetric(
        "quire:reclaimed", "Requests preempted because they ran over their tenant's share."
    ),
    STAT_RECOMPUTED_TOKENS_TOTAL: _WorkerMetric("quire:recomputed_tokens", "Tokens recomputed for preempted requests."),
    STAT_RECOMPUTE_S_TOTAL: _WorkerMetric(
        "quire:recompute_seconds", "Seconds of steps spent on recomputed tokens, by their share of a step's tokens."
    ),
    STAT_SWAP_OUT_BYTES_TOTAL: _WorkerMetric("quire:kv_swap_bytes", SWAP_HELP, (("direction", "out"),)),
    STAT_SWAP_IN_BYTES_TOTAL: _WorkerMetric("quire:kv_swap_bytes", SWAP_HELP, (("direction", "in"),)),
    STAT_SWAP_OUT_S_TOTAL: _WorkerMetric("quire:kv_swap_seconds", SWAP_TIME_HELP, (("direction", "out"),)),
    STAT_SWAP_IN_S_TOTAL: _WorkerMetric("quire:kv_swap_seconds", SWAP_TIME_HELP, (("direction", "in"),)),
    STAT_COPY_ON_WRITE_TOTAL: _WorkerMetric("quire:kv_copy_on_write", "Shared blocks copied at the first write."),
    STAT_PREFIX_QUERY_TOKENS_TOTAL: _WorkerMetric("quire:prefix_cache_query_tokens", PREFIX_QUERIES_HELP),
    STAT_PREFIX_HIT_TOKENS_TOTAL: _WorkerMetric("quire:prefix_cache_hit_tokens", PREFIX_HITS_HELP),
    STAT_RESUMED_TOTAL: _WorkerMetric(
        "quire:resumed", "Requests continued from another worker, which died, lost its lease, or left."
    ),
    STAT_JOBS_TAKEN_OVER_TOTAL: _WorkerMetric(
        "quire:jobs_taken_over", "Jobs of dead workers that this worker requeued."
    ),
    STAT_JOBS_LOST_TOTAL: _WorkerMetric(
        "quire:jobs_lost", "Jobs lost to other workers because this worker's lease expired."
    ),
    STAT_STEPS_TOTAL: _WorkerMetric(STEPS, "Engine steps."),
}
_VLLM_ALIASES: Mapping[str, _WorkerMetric] = {
    STAT_PREFIX_QUERY_TOKENS_TOTAL: _WorkerMetric("vllm:prefix_cache_queries", PREFIX_QUERIES_HELP),
    STAT_PREFIX_HIT_TOKENS_TOTAL: _WorkerMetric("vllm:prefix_cache_hits", PREFIX_HITS_HELP),
}

_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_NEXT_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_SUCCESSES = {EndReason.STOP: "stop", EndReason.LENGTH: "length", EndReason.CANCELLED: "abort"}
"""`finished_reason` of vLLM, for the ends that it counts as successes."""


GRAMMAR_RESULTS = ("compiled", "refused", "out_of_time", "out_of_memory", "crashed")
"""The last three ended the compiling process."""


class LaneStats(NamedTuple):
    """Waiting jobs of one lane of the queue; NaN if Redis is not reachable."""

    num_jobs: float
    oldest_wait_s: float  # 0 for an empty lane


class GatewayMetrics:
    """Metrics of one gateway, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._workers = _WorkerCollector(model_name)
        self._registry.register(self._workers)
        self._model_name = model_name
        labels_of_gateway = {"model_name": model_name, "engine": GATEWAY}
        self._first_token_s = _Intervals(
            FIRST_TOKEN_S, "Time to first token, seconds.", _FIRST_TOKEN_BUCKETS_S, labels_of_gateway
        )
        self._next_token_s = _Intervals(
            NEXT_TOKEN_S, "Time between tokens, seconds.", _NEXT_TOKEN_BUCKETS_S, labels_of_gateway
        )
        for intervals in (self._first_token_s, self._next_token_s):
            self._registry.register(intervals)
        self._request_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from admission to the end, seconds.", _REQUEST_BUCKETS_S
        )
        self._prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKEN_BUCKETS
        )
        self._generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", _TOKEN_BUCKETS
        )
        labels = ("model_name", "engine")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended successfully.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._ended = Counter(REQUESTS_ENDED, "Ended requests, by reason.", ("reason",), registry=self._registry)
        self._open = Gauge(OPEN_REQUESTS, "Open requests of this gateway.", registry=self._registry)
        self._queue_depth = Gauge(QUEUE_DEPTH, "Jobs waiting for a worker.", registry=self._registry)
        self._lane_depth = Gauge(
            QUEUE_LANE_DEPTH, "Jobs waiting for a worker, by lane.", ("lane",), registry=self._registry
        )
        self._oldest_wait_s = Gauge(
            QUEUE_OLDEST_WAIT_S, "Wait of the oldest waiting job, seconds, by lane.", ("lane",), registry=self._registry
        )
        self._leases = Gauge("quire:leases", "Workers with a running lease.", registry=self._registry)
        self._responses = Counter(
            "quire:http_responses", "HTTP responses.", ("route", "status"), registry=self._registry
        )
        self._grammars = Counter(
            "quire:grammars",
            "Compiled grammars, by result.",
            ("result",),
            registry=self._registry,
        )
        for result in GRAMMAR_RESULTS:
            self._grammars.labels(result)
        for reason in EndReason:
            self._ended.labels(reason.value)
        for word in _SUCCESSES.values():
            self._success.labels(model_name, GATEWAY, word)

    def track_request(self, num_prompt_tokens: int) -> RequestTimer:
        """Return the timer of a request that begins now."""
        self._open.inc()
        self._prompt_tokens.observe(num_prompt_tokens)
        return RequestTimer(self)

    def count_grammar(self, result: str) -> None:
        """Count a grammar; `result` is one of GRAMMAR_RESULTS."""
        self._grammars.labels(result).inc()

    def count_response(self, route: str, status: int) -> None:
        """Count an HTTP response; `route` is a pattern, never a client's path."""
        self._responses.labels(route, str(status)).inc()

    def set_fleet(
        self, stats_by_worker: Mapping[str, Mapping[str, float]], lanes: Mapping[str, LaneStats], num_leases: float
    ) -> None:
        """Set the state of workers and queue for the next exposition; NaN if Redis is not reachable."""
        self._workers.set_stats(stats_by_worker)
        self._queue_depth.set(sum(seen.num_jobs for seen in lanes.values()))
        for lane, seen in lanes.items():
            self._lane_depth.labels(lane).set(seen.num_jobs)
            self._oldest_wait_s.labels(lane).set(seen.oldest_wait_s)
        self._leases.set(num_leases)

    def latency_buckets(self) -> dict[str, list[tuple[float, float]]]:
        """Return cumulative (upper bound in s, count) of TTFT and of the gap between tokens."""
        return {"ttft": self._first_token_s.buckets(), "gap": self._next_token_s.buckets()}

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def observe_tokens(self, first: bool, elapsed_s: float) -> None:
        (self._first_token_s if first else self._next_token_s).observe(elapsed_s)

    def observe_end(self, reason: EndReason, num_tokens: int, elapsed_s: float) -> None:
        self._open.dec()
        self._request_s.observe(elapsed_s)
        self._generation_tokens.observe(num_tokens)
        self._ended.labels(reason.value).inc()
        if reason in _SUCCESSES:
            self._success.labels(self._model_name, GATEWAY, _SUCCESSES[reason]).inc()

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, help, ("model_name", "engine"), buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name, GATEWAY)


class RequestTimer:
    """Timer of one request."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._started_s = self._last_s = time.monotonic()
        self._num_tokens = 0

    def observe_tokens(self, num_tokens: int) -> None:
        """Observe tokens that arrived together, now."""
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        self._metrics.observe_tokens(self._num_tokens == 0, now_s - self._last_s)
        self._num_tokens += num_tokens
        self._last_s = now_s

    def observe_end(self, reason: EndReason) -> None:
        self._metrics.observe_end(reason, self._num_tokens, time.monotonic() - self._started_s)


class _Intervals(Collector):
    """Histogram for one thread, without a lock: observing costs a fraction of a microsecond per token."""

    def __init__(self, name: str, help: str, bounds_s: tuple[float, ...], labels: Mapping[str, str]) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds_s = (*bounds_s, float("inf"))
        self._counts = [0] * len(self._bounds_s)
        self._sum_s = 0.0

    def observe(self, interval_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, interval_s)] += 1
        self._sum_s += interval_s

    def buckets(self) -> list[tuple[float, float]]:
        """Return cumulative (upper bound in s, count)."""
        return list(zip(self._bounds_s, map(float, accumulate(self._counts)), strict=True))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        buckets = [("+Inf" if math.isinf(bound_s) else str(float(bound_s)), count) for bound_s, count in self.buckets()]
        family.add_metric(list(self._labels.values()), buckets, self._sum_s)
        yield family


class _WorkerCollector(Collector):
    """Export of every live worker's last stats."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._stats_by_worker: Mapping[str, Mapping[str, float]] = {}

    def set_stats(self, stats_by_worker: Mapping[str, Mapping[str, float]]) -> None:
        self._stats_by_worker = stats_by_worker

    def collect(self) -> Iterator[Metric]:
        yield from self._families(_WORKER_GAUGES, GaugeMetricFamily)
        yield from self._families(_WORKER_COUNTERS, CounterMetricFamily)
        yield from self._families(_VLLM_ALIASES, CounterMetricFamily)

    def _families(
        self, exported: Mapping[str, _WorkerMetric], kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    ) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for stat, metric in exported.items():
            names = ["model_name", "engine", *(name for name, _ in metric.labels)]
            family = families.setdefault(metric.name, kind(metric.name, metric.help, labels=names))
            for worker_id, stats in self._stats_by_worker.items():
                if stat in stats:
                    labels = [self._model_name, worker_id, *(value for _, value in metric.labels)]
                    family.add_metric(labels, stats[stat])
        yield from families.values()

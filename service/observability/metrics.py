"""Metrics with vLLM's names and labels where the meaning is the same, else named `quire:`.

The gateway re-exports `WorkerCard.stats` (see worker_metrics) with `engine` = worker id.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from service.errors import EndReason
from service.observability.buckets import REQUEST_BUCKETS_S
from service.observability.gateway_group import GatewayGroup, SharedNumbers
from service.observability.worker_metrics import (
    CACHE_CONFIG,
    CACHE_LABELS,
    LORA_INFO,
    VLLM_ALIASES,
    WEIGHT_BYTES,
    WORKER_HISTOGRAMS,
    WORKER_METRICS,
    AdapterLabels,
    WorkerFormats,
    WorkerMetric,
)

# Read by `quire top`
FIRST_TOKEN_S = "vllm:time_to_first_token_seconds"
NEXT_TOKEN_S = "vllm:inter_token_latency_seconds"
REQUESTS_ENDED = "quire:requests_ended"
OPEN_REQUESTS = "quire:open_requests"
QUEUE_DEPTH = "quire:queue_depth"
QUEUE_LANE_DEPTH = "quire:queue_lane_depth"
QUEUE_OLDEST_WAIT_S = "quire:queue_oldest_wait_seconds"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GATEWAY = "gateway"
"""Value of the label `engine` in a gateway's own metrics."""


_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_NEXT_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_CHOICE_BUCKETS = (1, 2, 5, 10, 20)

E2E_S = "vllm:e2e_request_latency_seconds"
PROMPT_TOKENS = "vllm:request_prompt_tokens"
GENERATION_TOKENS = "vllm:request_generation_tokens"
MOST_GENERATION_TOKENS = "vllm:request_max_num_generation_tokens"
DECODE_S = "vllm:request_decode_time_seconds"
TOKEN_S = "vllm:request_time_per_output_token_seconds"
MAX_TOKENS = "vllm:request_params_max_tokens"
N = "vllm:request_params_n"
_REQUEST_HISTOGRAMS = {
    E2E_S: ("Time from admission to the end, seconds.", REQUEST_BUCKETS_S),
    PROMPT_TOKENS: ("Prompt tokens per request.", _TOKEN_BUCKETS),
    GENERATION_TOKENS: ("Generated tokens per request.", _TOKEN_BUCKETS),
    MOST_GENERATION_TOKENS: ("Tokens of a request's longest choice.", _TOKEN_BUCKETS),
    DECODE_S: ("Time from the first token to the last, seconds.", REQUEST_BUCKETS_S),
    TOKEN_S: ("Mean time per token after the first, by request, seconds.", _NEXT_TOKEN_BUCKETS_S),
    MAX_TOKENS: ("Most tokens to generate per choice, by request.", _TOKEN_BUCKETS),
    N: ("Choices per request.", _CHOICE_BUCKETS),
}
"""Histograms with one observation per request: help and buckets."""

_SUCCESSES = {EndReason.STOP: "stop", EndReason.LENGTH: "length", EndReason.CANCELLED: "abort"}
"""End reasons that vLLM counts as successes, and their `finished_reason`."""


GRAMMAR_RESULTS = ("compiled", "refused", "out_of_time", "out_of_memory", "crashed")
"""Results of compiling a grammar. The last three killed the compiling process."""


class LaneStats(NamedTuple):
    """Waiting jobs of a lane; NaN without Redis."""

    num_jobs: float
    oldest_wait_s: float  # 0 if empty


class GatewayMetrics:
    """Metrics of a gateway or group, with their registry.

    In a group, prometheus_client stores each gateway's values in files in `group.folder` (PROMETHEUS_MULTIPROC_DIR),
    and every gateway exposes the sums.
    """

    def __init__(self, model_name: str, group: GatewayGroup | None = None) -> None:
        self._registry = CollectorRegistry()
        self._exposed = self._registry if group is None else CollectorRegistry()
        if group is not None:
            self._exposed.register(MultiProcessCollector(None, str(group.folder)))  # type: ignore[no-untyped-call]  # not typed
        self._workers = _WorkerCollector(model_name)
        self._exposed.register(self._workers)
        self._model_name = model_name
        labels_of_gateway = {"model_name": model_name, "engine": GATEWAY}
        self._first_token_s = _Intervals(
            FIRST_TOKEN_S, "Time to first token, seconds.", _FIRST_TOKEN_BUCKETS_S, labels_of_gateway, group
        )
        self._next_token_s = _Intervals(
            NEXT_TOKEN_S, "Time between tokens, seconds.", _NEXT_TOKEN_BUCKETS_S, labels_of_gateway, group
        )
        for intervals in (self._first_token_s, self._next_token_s):
            self._exposed.register(intervals)
        self._of_requests = {name: self._histogram(name, *how) for name, how in _REQUEST_HISTOGRAMS.items()}
        labels = ("model_name", "engine")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended successfully.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._ended = Counter(REQUESTS_ENDED, "Ended requests, by reason.", ("reason",), registry=self._registry)
        self._open = Gauge(
            OPEN_REQUESTS, "Open requests on this port.", registry=self._registry, multiprocess_mode="livesum"
        )
        self._queue_depth = self._fleet_gauge(QUEUE_DEPTH, "Jobs waiting for a worker.")
        self._lane_depth = self._fleet_gauge(QUEUE_LANE_DEPTH, "Jobs waiting for a worker, by lane.", "lane")
        self._oldest_wait_s = self._fleet_gauge(
            QUEUE_OLDEST_WAIT_S, "Wait of the oldest waiting job, seconds, by lane.", "lane"
        )
        self._leases = self._fleet_gauge("quire:leases", "Workers with a running lease.")
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

    def track_request(self, num_prompt_tokens: int, max_tokens: int, num_choices: int = 1) -> RequestTimer:
        """Return the timer of a request that starts now."""
        self._open.inc()
        self._of_requests[PROMPT_TOKENS].observe(num_prompt_tokens)
        self._of_requests[MAX_TOKENS].observe(max_tokens)
        self._of_requests[N].observe(num_choices)
        return RequestTimer(self)

    def count_grammar(self, result: str) -> None:
        """Count a grammar; `result` is one of GRAMMAR_RESULTS."""
        self._grammars.labels(result).inc()

    def count_response(self, route: str, status: int) -> None:
        """Count a response. `route` is a pattern, never a client's path."""
        self._responses.labels(route, str(status)).inc()

    def set_fleet(
        self,
        stats_by_worker: Mapping[str, Mapping[str, float]],
        lanes: Mapping[str, LaneStats],
        num_leases: float,
        formats_by_worker: Mapping[str, WorkerFormats] | None = None,
        adapters_by_worker: Mapping[str, AdapterLabels] | None = None,
    ) -> None:
        """Set workers and queue for the next exposition; NaN without Redis."""
        self._workers.set_workers(stats_by_worker, formats_by_worker or {}, adapters_by_worker or {})
        self._queue_depth.set(sum(seen.num_jobs for seen in lanes.values()))
        for lane, seen in lanes.items():
            self._lane_depth.labels(lane).set(seen.num_jobs)
            self._oldest_wait_s.labels(lane).set(seen.oldest_wait_s)
        self._leases.set(num_leases)

    def latency_buckets(self) -> dict[str, list[tuple[float, float]]]:
        """Return cumulative (upper bound in s, count) of TTFT and inter-token latency."""
        return {"ttft": self._first_token_s.buckets(), "gap": self._next_token_s.buckets()}

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format, CONTENT_TYPE."""
        return generate_latest(self._exposed)

    def num_open(self) -> int:
        """Return the group's number of open requests."""
        return int(self._exposed.get_sample_value(OPEN_REQUESTS) or 0)

    def observe_tokens(self, first: bool, elapsed_s: float) -> None:
        (self._first_token_s if first else self._next_token_s).observe(elapsed_s)

    def observe_end(
        self, reason: EndReason, num_tokens: int, elapsed_s: float, decode_s: float, most_tokens: int
    ) -> None:
        """Record a request's end. `decode_s`: from first to last token; `most_tokens`: of the longest choice."""
        self._open.dec()
        self._of_requests[E2E_S].observe(elapsed_s)
        self._of_requests[DECODE_S].observe(decode_s)
        if num_tokens > 1:
            self._of_requests[TOKEN_S].observe(decode_s / (num_tokens - 1))
        self._of_requests[GENERATION_TOKENS].observe(num_tokens)
        self._of_requests[MOST_GENERATION_TOKENS].observe(most_tokens)
        self._ended.labels(reason.value).inc()
        if reason in _SUCCESSES:
            self._success.labels(self._model_name, GATEWAY, _SUCCESSES[reason]).inc()

    def _fleet_gauge(self, name: str, help: str, *labels: str) -> Gauge:
        """Return a gauge that each exposition sets; in a group the latest value counts."""
        return Gauge(name, help, labels, registry=self._registry, multiprocess_mode="livemostrecent")

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, help, ("model_name", "engine"), buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name, GATEWAY)


class RequestTimer:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._started_s = self._first_s = self._last_s = time.monotonic()
        self._num_tokens = 0

    def observe_tokens(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        self._metrics.observe_tokens(self._num_tokens == 0, now_s - self._last_s)
        if self._num_tokens == 0:
            self._first_s = now_s
        self._num_tokens += num_tokens
        self._last_s = now_s

    def observe_end(self, reason: EndReason, most_tokens: int | None = None) -> None:
        """`most_tokens`: of the longest choice; None: there is only one."""
        most = self._num_tokens if most_tokens is None else most_tokens
        decode_s = self._last_s - self._first_s
        self._metrics.observe_end(reason, self._num_tokens, time.monotonic() - self._started_s, decode_s, most)


class _Intervals(Collector):
    """Single-threaded histogram without a lock: a fraction of a microsecond per token."""

    def __init__(
        self,
        name: str,
        help: str,
        bounds_s: tuple[float, ...],
        labels: Mapping[str, str],
        group: GatewayGroup | None = None,
    ) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds_s = (*bounds_s, float("inf"))
        self._numbers = SharedNumbers(name.partition(":")[2], len(self._bounds_s) + 1, group)
        self._own = self._numbers.own  # count per bucket, then the sum in seconds

    def observe(self, interval_s: float) -> None:
        self._own[bisect_left(self._bounds_s, interval_s)] += 1
        self._own[-1] += interval_s

    def buckets(self) -> list[tuple[float, float]]:
        return list(zip(self._bounds_s, accumulate(self._numbers.totals()[:-1]), strict=True))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), _bucket_labels(self.buckets()), self._numbers.totals()[-1])
        yield family


class _WorkerCollector(Collector):
    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._stats_by_worker: Mapping[str, Mapping[str, float]] = {}
        self._formats_by_worker: Mapping[str, WorkerFormats] = {}
        self._adapters_by_worker: Mapping[str, AdapterLabels] = {}

    def set_workers(
        self,
        stats_by_worker: Mapping[str, Mapping[str, float]],
        formats_by_worker: Mapping[str, WorkerFormats],
        adapters_by_worker: Mapping[str, AdapterLabels],
    ) -> None:
        self._stats_by_worker = stats_by_worker
        self._adapters_by_worker = adapters_by_worker
        self._formats_by_worker = formats_by_worker

    def collect(self) -> Iterator[Metric]:
        yield from self._stat_families()
        yield from self._histogram_families()
        yield from self._format_families()
        if self._adapters_by_worker:
            yield self._adapter_family()

    def _histogram_families(self) -> Iterator[Metric]:
        for histogram in WORKER_HISTOGRAMS:
            family = HistogramMetricFamily(histogram.name, histogram.help, labels=["model_name", "engine"])
            for worker_id, stats in self._stats_by_worker.items():
                cumulative = histogram.cumulative(stats)
                if cumulative is not None:
                    buckets = _bucket_labels(cumulative)
                    family.add_metric([self._model_name, worker_id], buckets, stats[f"{histogram.stat}_sum"])
            yield family

    def _format_families(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        cache = GaugeMetricFamily(CACHE_CONFIG, "KV cache of a worker.", labels=[*labels, *CACHE_LABELS])
        weights = GaugeMetricFamily(WEIGHT_BYTES, "Bytes of a worker's weights.", labels=[*labels, "format"])
        for worker_id, formats in self._formats_by_worker.items():
            own = [self._model_name, worker_id]
            cache.add_metric([*own, *formats.cache_labels], 1.0)
            weights.add_metric([*own, formats.weight_format], formats.weight_bytes)
        yield from (cache, weights)

    def _adapter_family(self) -> Metric:
        labels = ["model_name", "engine", *AdapterLabels._fields]
        family = GaugeMetricFamily(LORA_INFO, "LoRA adapters of a worker's requests, at this time.", labels=labels)
        for worker_id, adapters in self._adapters_by_worker.items():
            family.add_metric([self._model_name, worker_id, *adapters], time.time())
        return family

    def _stat_families(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric in (*WORKER_METRICS, *VLLM_ALIASES):
            family = families.setdefault(metric.name, _family(metric))
            for worker_id, stats in self._stats_by_worker.items():
                if metric.stat in stats:
                    labels = [self._model_name, worker_id, *(value for _, value in metric.labels)]
                    family.add_metric(labels, stats[metric.stat])
        yield from families.values()


def _bucket_labels(buckets: Iterable[tuple[float, float]]) -> list[tuple[str, float]]:
    return [("+Inf" if math.isinf(bound) else str(float(bound)), count) for bound, count in buckets]


def _family(metric: WorkerMetric) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=["model_name", "engine", *(name for name, _ in metric.labels)])

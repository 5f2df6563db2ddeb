"""Worker statistics: key in WorkerCard.stats, metric, and source.

To add one, add a row here and, unless it is already counted, a counter in service/engine/stats.py ("engine") or
service/worker/job_counts.py ("jobs").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from service.observability.buckets import REQUEST_BUCKETS_S, STEP_TOKEN_BUCKETS

NUM_RUNNING = "vllm:num_requests_running"
NUM_WAITING = "vllm:num_requests_waiting"
PROMPT_TOKENS = "vllm:prompt_tokens"
GENERATION_TOKENS = "vllm:generation_tokens"
PREEMPTIONS = "vllm:num_preemptions"
KV_BLOCKS = "quire:kv_blocks"
KV_WASTE_RATIO = "quire:kv_waste_ratio"
STEPS = "quire:steps"
STEP_TIME_MS = "quire:step_time_ms"

STAT_PROMPT_TOKENS_TOTAL = "prompt_tokens_total"
STAT_GENERATION_TOKENS_TOTAL = "generation_tokens_total"
"""Keys read by the gateway's back-pressure."""

ENGINE, JOBS = "engine", "jobs"
"""Sources: EngineStats, JobCounts."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WorkerMetric:
    """A worker statistic. Counters start at 0 with the process, as Prometheus expects."""

    stat: str  # key in WorkerCard.stats
    name: str
    help: str
    source: str  # ENGINE or JOBS
    attribute: str  # of the source
    is_counter: bool
    labels: Labels = ()
    index: int | None = None  # within the attribute, if that is a tuple


def _gauge(stat: str, name: str, help: str, attribute: str, source: str = ENGINE, labels: Labels = ()) -> WorkerMetric:
    return WorkerMetric(stat, name, help, source, attribute, False, labels)


def _counter(
    stat: str, name: str, help: str, attribute: str, source: str = ENGINE, labels: Labels = ()
) -> WorkerMetric:
    return WorkerMetric(stat, name, help, source, attribute, True, labels)


_BLOCKS_HELP = "KV blocks: free, used by one sequence, shared by several, or cached for later prompts."
_PREEMPTIONS_HELP = "Preempted requests, by how they are restored."
_SWAP_HELP = "Bytes of KV blocks copied to and from host memory."
_SWAP_TIME_HELP = "Seconds of these copies; they overlap with steps."
_QUERIES_HELP = "Prompt tokens looked up in the prefix cache."
_HITS_HELP = "Prompt tokens found in the prefix cache."
_RESUMED_HELP = "Requests continued from another worker, which died, lost its lease, or left."
_OUT, _IN = (("direction", "out"),), (("direction", "in"),)


def _blocks(tier: str, state: str) -> Labels:
    return (("tier", tier), ("state", state))


WORKER_METRICS = (
    _gauge("num_running", NUM_RUNNING, "Running requests.", "num_running"),
    _gauge("num_waiting", NUM_WAITING, "Requests waiting in the engine.", "num_waiting"),
    _gauge("kv_usage", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0..1.", "kv_usage"),
    _gauge(
        "kv_waste_ratio", KV_WASTE_RATIO, "Share of the used blocks' token slots that are empty, 0..1.", "waste_ratio"
    ),
    _gauge("num_blocks_free", KV_BLOCKS, _BLOCKS_HELP, "num_blocks_free", labels=_blocks("gpu", "free")),
    _gauge("num_blocks_used", KV_BLOCKS, _BLOCKS_HELP, "num_blocks_exclusive", labels=_blocks("gpu", "used")),
    _gauge("num_blocks_shared", KV_BLOCKS, _BLOCKS_HELP, "num_blocks_shared", labels=_blocks("gpu", "shared")),
    _gauge("num_blocks_cached", KV_BLOCKS, _BLOCKS_HELP, "num_blocks_cached", labels=_blocks("gpu", "cached")),
    _gauge("num_host_blocks_free", KV_BLOCKS, _BLOCKS_HELP, "num_host_blocks_free", labels=_blocks("host", "free")),
    _gauge("num_host_blocks_used", KV_BLOCKS, _BLOCKS_HELP, "num_host_blocks_used", labels=_blocks("host", "used")),
    _gauge(
        "num_host_blocks_cached", KV_BLOCKS, _BLOCKS_HELP, "num_host_blocks_cached", labels=_blocks("host", "cached")
    ),
    _gauge("step_time_ms", STEP_TIME_MS, "Duration of the last step, milliseconds.", "last_step_ms"),
    _gauge("num_jobs_held", "quire:jobs_held", "Jobs claimed by the worker, under its lease.", "num_held", JOBS),
    _counter(STAT_PROMPT_TOKENS_TOTAL, PROMPT_TOKENS, "Prompt tokens computed.", "num_prompt_tokens"),
    _counter(STAT_GENERATION_TOKENS_TOTAL, GENERATION_TOKENS, "Tokens generated.", "num_output_tokens"),
    _counter("preemptions_total", PREEMPTIONS, "Preempted requests.", "num_preemptions"),
    _counter("swapped_total", "quire:preemptions", _PREEMPTIONS_HELP, "num_swapped", labels=(("kind", "swap"),)),
    _counter(
        "recomputed_total", "quire:preemptions", _PREEMPTIONS_HELP, "num_recomputed", labels=(("kind", "recompute"),)
    ),
    _counter(
        "reclaimed_total",
        "quire:reclaimed",
        "Requests preempted because they ran over their tenant's share.",
        "num_reclaimed",
    ),
    _counter(
        "recomputed_tokens_total",
        "quire:recomputed_tokens",
        "Tokens recomputed for preempted requests.",
        "num_recomputed_tokens",
    ),
    _counter(
        "recompute_s_total",
        "quire:recompute_seconds",
        "Seconds of steps spent on recomputed tokens, by their share of a step's tokens.",
        "recompute_s",
    ),
    _counter("swap_out_bytes_total", "quire:kv_swap_bytes", _SWAP_HELP, "swap_out_bytes", labels=_OUT),
    _counter("swap_in_bytes_total", "quire:kv_swap_bytes", _SWAP_HELP, "swap_in_bytes", labels=_IN),
    _counter("swap_out_s_total", "quire:kv_swap_seconds", _SWAP_TIME_HELP, "swap_out_s", labels=_OUT),
    _counter("swap_in_s_total", "quire:kv_swap_seconds", _SWAP_TIME_HELP, "swap_in_s", labels=_IN),
    _counter(
        "copy_on_write_total", "quire:kv_copy_on_write", "Shared blocks copied at the first write.", "num_block_copies"
    ),
    _counter("prefix_query_tokens_total", "quire:prefix_cache_query_tokens", _QUERIES_HELP, "num_query_tokens"),
    _counter("prefix_hit_tokens_total", "quire:prefix_cache_hit_tokens", _HITS_HELP, "num_hit_tokens"),
    _counter("resumed_total", "quire:resumed", _RESUMED_HELP, "num_resumed", JOBS),
    _counter(
        "jobs_taken_over_total",
        "quire:jobs_taken_over",
        "Jobs of dead workers that this worker requeued.",
        "num_taken_over",
        JOBS,
    ),
    _counter(
        "jobs_lost_total",
        "quire:jobs_lost",
        "Jobs lost to other workers because this worker's lease expired.",
        "num_lost",
        JOBS,
    ),
    _counter("steps_total", STEPS, "Engine steps.", "num_steps"),
    _counter("drafts_total", "vllm:spec_decode_num_drafts", "Runs of draft tokens verified.", "num_drafts"),
    _counter("draft_tokens_total", "vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", "num_draft_tokens"),
    _counter(
        "accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens accepted.",
        "num_accepted_tokens",
    ),
    *(
        WorkerMetric(
            f"accepted_tokens_total_{position}",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the run.",
            ENGINE,
            "num_accepted_per_pos",
            True,
            (("position", str(position)),),
            position,
        )
        for position in range(16)
    ),
    *(
        WorkerMetric(
            f"{outcome}_tokens_total_{source}",
            f"quire:spec_decode_{outcome}_tokens",
            f"Draft tokens {outcome}, by what drafted them.",
            ENGINE,
            f"num_{outcome}_by_source",
            True,
            (("source", source),),
            index,
        )
        for outcome in ("drafted", "accepted")
        for index, source in enumerate(("grammar", "ngram", "suffix", "eagle3", "draft_model"))
    ),
    _gauge(
        "mean_draft_length",
        "quire:spec_decode_mean_draft_length",
        "Draft tokens per decode of the last step.",
        "mean_draft_length",
    ),
)


@dataclass(frozen=True)
class WorkerHistogram:
    """A worker's histogram, stored in WorkerCard.stats as `stat`_0, `stat`_1, ... and `stat`_sum.

    Zeros are left out, except for the sum.
    """

    stat: str
    name: str
    help: str
    bounds: tuple[float, ...]
    source: str
    attribute: str  # path to the values of Buckets

    def entries(self, values: Sequence[float]) -> dict[str, float]:
        counted = {f"{self.stat}_{index}": count for index, count in enumerate(values[:-1]) if count}
        return {**counted, f"{self.stat}_sum": values[-1]}

    def cumulative(self, stats: Mapping[str, float]) -> list[tuple[float, float]] | None:
        """Return (upper bound, count); None without entries, as from a worker of an earlier version."""
        if f"{self.stat}_sum" not in stats:
            return None
        counts = accumulate(stats.get(f"{self.stat}_{index}", 0.0) for index in range(len(self.bounds) + 1))
        return list(zip((*self.bounds, math.inf), counts, strict=True))


WORKER_HISTOGRAMS = (
    WorkerHistogram(
        "queue_time_s",
        "vllm:request_queue_time_seconds",
        "Time from admission to a request's first step, seconds.",
        REQUEST_BUCKETS_S,
        JOBS,
        "queue_time.values",
    ),
    WorkerHistogram(
        "prefill_time_s",
        "vllm:request_prefill_time_seconds",
        "Time from a request's first step to its first token, seconds.",
        REQUEST_BUCKETS_S,
        JOBS,
        "prefill_time.values",
    ),
    WorkerHistogram(
        "inference_time_s",
        "vllm:request_inference_time_seconds",
        "Time from a request's first step to its end, seconds.",
        REQUEST_BUCKETS_S,
        JOBS,
        "inference_time.values",
    ),
    WorkerHistogram(
        "iteration_tokens",
        "vllm:iteration_tokens_total",
        "Tokens of a step: prompts completed in it, and tokens generated.",
        STEP_TOKEN_BUCKETS,
        ENGINE,
        "iteration_tokens",
    ),
)

VLLM_ALIASES = (
    _counter("prefix_query_tokens_total", "vllm:prefix_cache_queries", _QUERIES_HELP, "num_query_tokens"),
    _counter("prefix_hit_tokens_total", "vllm:prefix_cache_hits", _HITS_HELP, "num_hit_tokens"),
)
"""Rows of WORKER_METRICS repeated under vLLM's names."""


CACHE_CONFIG = "vllm:cache_config_info"
CACHE_LABELS = ("block_size", "cache_dtype", "num_gpu_blocks", "block_bytes")
"""All but the last are vLLM's."""

WEIGHT_BYTES = "quire:weight_bytes"


@dataclass(frozen=True)
class WorkerFormats:
    """Weight and KV-cache formats of a worker, constant after start."""

    weight_format: str
    weight_bytes: int
    kv_cache_dtype: str
    block_size: int  # tokens
    block_bytes: int
    num_blocks: int

    @property
    def cache_labels(self) -> list[str]:
        """Values of CACHE_LABELS."""
        return [str(self.block_size), self.kv_cache_dtype, str(self.num_blocks), str(self.block_bytes)]


LORA_INFO = "vllm:lora_requests_info"


class AdapterLabels(NamedTuple):
    """One worker's labels of LORA_INFO, as in vLLM."""

    max_lora: str
    running_lora_adapters: str  # comma-separated
    waiting_lora_adapters: str


def read_stats(source: str, values: object) -> dict[str, float]:
    """Return the entries of WorkerCard.stats from `source`, whose attributes `values` has."""
    stats = {each.stat: _read(each, values) for each in WORKER_METRICS if each.source == source}
    for each in WORKER_HISTOGRAMS:
        if each.source == source:
            stats |= each.entries(attrgetter(each.attribute)(values))
    return stats


def _read(metric: WorkerMetric, values: object) -> float:
    value = getattr(values, metric.attribute)
    return float(value if metric.index is None else value[metric.index])

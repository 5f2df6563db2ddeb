"""The table of `vllm bench serve`. Latencies count from the sending of a request, not from its due time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from service.bench.load_client import Answer
from service.bench.trace import TracedRequest

TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
WIDTH = 50


@dataclass(frozen=True, kw_only=True)
class Load:
    rate: float
    max_concurrency: int | None
    duration_s: float


def vllm_table(
    load: Load,
    requests: Sequence[TracedRequest],
    answers: Sequence[Answer],
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99,),
) -> str:
    """Return the table; `metrics` are keys of TITLES."""
    done = [(request, answer) for request, answer in zip(requests, answers, strict=True) if answer.error is None]
    num_input = sum(request.num_prompt_tokens for request, _ in done)
    num_output = sum(answer.num_tokens for _, answer in done)
    rows: list[tuple[str, float | int]] = [
        ("Successful requests:", len(done)),
        ("Failed requests:", len(answers) - len(done)),
    ]
    if load.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", load.max_concurrency))
    if load.rate != float("inf"):
        rows.append(("Request rate configured (RPS):", load.rate))
    rows += [
        ("Benchmark duration (s):", load.duration_s),
        ("Total input tokens:", num_input),
        ("Total generated tokens:", num_output),
        ("Request throughput (req/s):", len(done) / load.duration_s),
        ("Output token throughput (tok/s):", num_output / load.duration_s),
        ("Total token throughput (tok/s):", (num_input + num_output) / load.duration_s),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *(_row(*row) for row in rows)]
    values_ms = _latencies_ms([answer for _, answer in done if answer.chunks_s])
    for name in metrics:
        title, short = TITLES[name]
        lines.append(title.center(WIDTH, "-"))
        lines += [_row(f"{label} {short} (ms):", value) for label, value in _stats(values_ms[name], percentiles)]
    return "\n".join([*lines, "=" * WIDTH])


def _latencies_ms(answers: Sequence[Answer]) -> dict[str, list[float]]:
    return {
        "ttft": [1e3 * (answer.chunks_s[0] - answer.sent_s) for answer in answers],
        "tpot": [
            1e3 * (answer.chunks_s[-1] - answer.chunks_s[0]) / (answer.num_tokens - 1)
            for answer in answers
            if answer.num_tokens > 1
        ],
        "itl": [1e3 * (later - earlier) for answer in answers for earlier, later in pairwise(answer.chunks_s)],
        "e2el": [1e3 * (answer.chunks_s[-1] - answer.sent_s) for answer in answers],
    }


def _stats(values: Sequence[float], percentiles: Sequence[float]) -> list[tuple[str, float]]:
    some = values or [0.0]  # vLLM prints 0 where nothing was measured
    high = [(f"P{percentile:g}", float(np.percentile(some, percentile))) for percentile in percentiles]
    return [("Mean", float(np.mean(some))), ("Median", float(np.median(some))), *high]


def _row(label: str, value: float) -> str:
    text = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40} {text:<10}".rstrip()

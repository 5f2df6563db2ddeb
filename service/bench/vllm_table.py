"""The table and saved result of `vllm bench serve`. Latencies count from when a request was sent, not due."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from service.bench.flag_values import positive_number
from service.bench.load_client import Answer
from service.bench.trace import TracedRequest
from service.errors import StartupError

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
    objectives_ms: Mapping[str, float] = field(default_factory=dict)  # goodput objectives: ttft, tpot, e2el


def add_table_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--percentile-metrics",
        metavar="NAMES",
        default="ttft,tpot,itl",
        help="latencies in vLLM's table, of ttft, tpot, itl and e2el (default: ttft,tpot,itl)",
    )
    parser.add_argument(
        "--metric-percentiles", metavar="NUMBERS", default="99", help="percentiles in vLLM's table (default: 99)"
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        default=[],
        help="objectives of vLLM's goodput: ttft, tpot, e2el (default: none)",
    )
    parser.add_argument("--save-result", action="store_true", help="write vLLM's JSON of the figures")
    parser.add_argument(
        "--result-dir", type=Path, metavar="DIR", default=Path(), help="its folder (default: the working directory)"
    )
    parser.add_argument("--result-filename", metavar="NAME", help="its name (default: as vLLM's, with model and time)")


def vllm_table(
    load: Load,
    requests: Sequence[TracedRequest],
    answers: Sequence[Answer],
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99,),
) -> str:
    """Return the table; `metrics` are keys of TITLES."""
    done = _done(requests, answers)
    num_input, num_output = _num_tokens(done)
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
        *([("Request goodput (req/s):", _goodput(load, done))] if load.objectives_ms else ()),
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


def vllm_record(
    load: Load,
    requests: Sequence[TracedRequest],
    answers: Sequence[Answer],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, float | int | str | None]:
    """Return the figures under the names in vLLM's saved results."""
    done = _done(requests, answers)
    num_input, num_output = _num_tokens(done)
    record: dict[str, float | int | str | None] = {
        "num_prompts": len(answers),
        "request_rate": load.rate if load.rate != float("inf") else "inf",
        "max_concurrency": load.max_concurrency,
        "duration": load.duration_s,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / load.duration_s,
        "request_goodput": _goodput(load, done) if load.objectives_ms else None,
        "output_throughput": num_output / load.duration_s,
        "total_token_throughput": (num_input + num_output) / load.duration_s,
    }
    values_ms = _latencies_ms([answer for _, answer in done if answer.chunks_s])
    for name in metrics:
        stats = [*_stats(values_ms[name], percentiles), ("Std", float(np.std(values_ms[name] or [0.0])))]
        record |= {f"{label.lower()}_{name}_ms": value for label, value in stats}
    return record


def read_objectives(words: Sequence[str]) -> dict[str, float]:
    """Parse `--goodput ttft:200 tpot:20`, in ms. Raises StartupError."""
    objectives: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise StartupError(f"--goodput: {word!r} is not of the form ttft:MS, tpot:MS or e2el:MS")
        objectives[name] = positive_number("--goodput", text)
    return objectives


def result_path(folder: Path, name: str | None, load: Load, model: str, now: datetime) -> Path:
    """Return the path of a saved result, named as in vLLM; create its folder. Raises StartupError."""
    limit = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    default = f"vllm-{load.rate}qps{limit}-{model.rpartition('/')[2]}-{now:%Y%m%d-%H%M%S}.json"
    path = folder / (name or default)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--result-dir: {folder} cannot be made: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StartupError(f"--result-filename: {path} cannot be written")
    return path


def write_result(path: Path, record: Mapping[str, object]) -> None:
    """Write a result. Raises StartupError."""
    try:
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--result-filename: {path} cannot be written: {error.strerror}") from None


Done = Sequence[tuple[TracedRequest, Answer]]


def _done(requests: Sequence[TracedRequest], answers: Sequence[Answer]) -> Done:
    return [(request, answer) for request, answer in zip(requests, answers, strict=True) if answer.error is None]


def _num_tokens(done: Done) -> tuple[int, int]:
    return sum(request.num_prompt_tokens for request, _ in done), sum(answer.num_tokens for _, answer in done)


def _goodput(load: Load, done: Done) -> float:
    """Return the rate of requests that meet every objective, in requests/s."""

    def is_good(answer: Answer) -> bool:
        latencies = _latencies_ms([answer])
        return all((latencies[name] or [0.0])[0] <= limit for name, limit in load.objectives_ms.items())

    return sum(bool(answer.chunks_s) and is_good(answer) for _, answer in done) / load.duration_s


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
    some = values or [0.0]  # vLLM prints 0 for no measurements
    high = [(f"P{percentile:g}", float(np.percentile(some, percentile))) for percentile in percentiles]
    return [("Mean", float(np.mean(some))), ("Median", float(np.median(some))), *high]


def _row(label: str, value: float) -> str:
    text = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40} {text:<10}".rstrip()

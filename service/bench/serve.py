"""`quire bench serve`: open-loop load on a running service."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import aiohttp
import numpy as np

from service.bench.datasets import add_dataset_flags, make_dataset, read_rate, texts_of
from service.bench.flag_values import positive_number, whole_number
from service.bench.load_client import CHATS, COMPLETIONS, Answer, Task
from service.bench.load_client import run as run_task
from service.bench.report import Figure, Spread, python_script, script_environment, write_report
from service.bench.trace import TracedRequest, read_trace
from service.bench.vllm_table import (
    TITLES,
    Load,
    add_table_flags,
    read_objectives,
    result_path,
    vllm_record,
    vllm_table,
    write_result,
)
from service.cli.client.api import unreachable
from service.cli.table import print_table, shown
from service.config.settings import Settings
from service.errors import StartupError
from service.queue.embedded.die_with_parent import die_with_parent

API_KEY_VARIABLE = "QUIRE_API_KEY"
CHAT_BACKEND = "openai-chat"
START_DELAY_S = 0.5

GRACE_S = 30.0

ANSWER_LINE_BYTES = 1 << 28
CURVE_POINTS = 400
OPEN_PER_CLIENT = 64
"""Open requests per client process under --max-concurrency."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    url: str
    api_key: str | None
    rate: float  # requests/s
    num_clients: int
    max_seconds: float
    slo_ttft_ms: float
    slo_gap_ms: float
    vocab_size: int
    requests: list[TracedRequest]
    prompts: list[list[int]] | list[str] | None = None
    ignore_eos: bool = True
    max_concurrency: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServeFigures:
    """Figures over all clients. A gap is the time between two chunks of a response.

    `goodput_per_s` counts complete responses that meet the TTFT objective and, by mean gap, the gap objective.
    """

    rate: float
    num_requests: int
    sample_s: float  # from first to last due time
    num_errors: int
    total_s: float  # from start to last end
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    good_share: float
    ttft_ms: Spread | None
    gap_ms: Spread | None
    client_lag_ms: Spread | None  # send delay; if it is not small, the clients are the bottleneck
    errors: dict[str, int]


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="the service (default: http://--host:--port, http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--host", dest="asked_host", metavar="TEXT", default="127.0.0.1", help="the service's host (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", dest="asked_port", metavar="N", default="8000", help="the service's port (default: 8000)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="lengths and arrivals of requests (default: --dataset-name)"
    )
    parser.add_argument("--rate", metavar="X", help="requests/s of a trace; arrivals are divided by it")
    add_dataset_flags(parser)
    parser.add_argument("--max-concurrency", metavar="N", help="max open requests (default: no limit)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="answers have their full length (a trace's always have)"
    )
    parser.add_argument(
        "--num-warmups", metavar="N", default="0", help="unmeasured requests before the run (default: 0)"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="model name of requests (default: --model)")
    parser.add_argument("--disable-tqdm", action="store_true", help="no effect: there is no progress bar")
    parser.add_argument(
        "--backend",
        choices=("vllm", "openai", CHAT_BACKEND),
        help="openai-chat asks /v1/chat/completions, with prompts as text (default: /v1/completions)",
    )
    parser.add_argument("--endpoint", choices=(COMPLETIONS, CHATS), help="the backend's path (default: as --backend)")
    parser.add_argument("--tokenizer", metavar="TEXT", help="no effect: the service tokenizes")
    parser.add_argument("--trust-remote-code", action="store_true", help="no effect: no code of a model is run")
    add_table_flags(parser)
    parser.add_argument("--num-requests", metavar="N", help="first N requests of the trace (default: all)")
    parser.add_argument(
        "--max-seconds", metavar="X", default="600", help="seconds until open requests count as failed (default: 600)"
    )
    parser.add_argument("--clients", metavar="N", default="8", help="client processes (default: 8)")
    parser.add_argument("--model", dest="asked_model", metavar="NAME", help="model name (default: the first listed)")
    parser.add_argument("--api-key", dest="shown_key", metavar="KEY", help=f"API key (default: ${API_KEY_VARIABLE})")
    parser.add_argument(
        "--vocab-size", metavar="N", default="4096", help="upper bound of prompt token ids (default: 4096)"
    )
    parser.add_argument(
        "--slo-ttft-ms", metavar="X", default="1000", help="TTFT objective of goodput, ms (default: 1000)"
    )
    parser.add_argument(
        "--slo-gap-ms", metavar="X", default="50", help="mean gap objective of goodput, ms (default: 50)"
    )


def run_serve_bench(_: Settings, flags: argparse.Namespace) -> int:
    """Run the bench. Return the exit status, 1 if a request failed. Raises StartupError."""
    metrics, percentiles = read_table_flags(flags)
    objectives = read_objectives(flags.goodput)
    plan, model, path, answers = asyncio.run(_plan_and_drive(flags))
    figures = summarize(plan, answers)
    rows = [(name.replace("_", " "), _shown(value)) for name, value in vars(figures).items() if name != "errors"]
    print_table(rows)
    if figures.errors:  # separately, since the texts may be long
        print_table([(f"error: {error}", f"{count:,}") for error, count in figures.errors.items()])
    if flags.dataset_name is not None:
        load = replace(_load(plan), duration_s=figures.total_s, objectives_ms=objectives)
        print("\n" + vllm_table(load, plan.requests, answers, metrics, percentiles))
        if path is not None:
            about = {"date": f"{datetime.now():%Y%m%d-%H%M%S}", "backend": flags.backend or "vllm", "model_id": model}
            more = {"tokenizer_id": flags.tokenizer or model, "burstiness": float(flags.burstiness)}
            write_result(path, {**about, **more, **vllm_record(load, plan.requests, answers, metrics, percentiles)})
    workload = flags.dataset_name or flags.trace.stem
    record = {"bench": "serve", "url": plan.url, "trace": workload, "clients": plan.num_clients}
    record |= {"slo_ttft_ms": plan.slo_ttft_ms, "slo_gap_ms": plan.slo_gap_ms}
    rate = {"rate": plan.rate if math.isfinite(plan.rate) else "inf"}
    write_report(flags, {**record, **asdict(figures), **rate}, _figure(plan, answers))
    return 1 if figures.num_errors else 0


def read_table_flags(flags: argparse.Namespace) -> tuple[list[str], list[float]]:
    """Return the latencies and percentiles for vLLM's table. Raises StartupError."""
    metrics = [name.strip() for name in flags.percentile_metrics.split(",")]
    if unknown := [name for name in metrics if name not in TITLES]:
        raise StartupError(f"--percentile-metrics: {unknown[0]!r} is not supported ({', '.join(TITLES)})")
    texts = flags.metric_percentiles.split(",")
    return metrics, [positive_number("--metric-percentiles", text.strip(), high=100) for text in texts]


async def _plan_and_drive(flags: argparse.Namespace) -> tuple[Plan, str, Path | None, list[Answer]]:
    """Return the plan, the model's name, the --save-result file and the answers."""
    plan = read_plan(flags)
    num_warmups = whole_number("--num-warmups", flags.num_warmups, low=0)
    model = flags.served_model_name or flags.asked_model or await first_model(plan)
    path = None
    if flags.save_result:
        path = result_path(flags.result_dir, flags.result_filename, _load(plan), model, datetime.now())
    if flags.dataset_name is not None:
        async with aiohttp.ClientSession(headers=_headers(plan)) as http:
            dataset = await make_dataset(flags, http, plan.url, model)
            texts = None
            if flags.backend == CHAT_BACKEND:
                texts = await texts_of(dataset, http, plan.url, model, plan.vocab_size)
        plan = replace(plan, requests=dataset.requests, prompts=texts or dataset.prompts)
    plan = replace(plan, num_clients=min(plan.num_clients, len(plan.requests)))
    await _warm_up(plan, model, num_warmups)
    return plan, model, path, await drive(plan, model)


def _load(plan: Plan) -> Load:
    return Load(rate=plan.rate, max_concurrency=plan.max_concurrency, duration_s=0.0)


async def _warm_up(plan: Plan, model: str, num_requests: int) -> None:
    """Send the first request `num_requests` times at once, as vLLM does. Raises StartupError if one fails."""
    first = plan.requests[0]
    requests = [(0, first.num_prompt_tokens, first.num_output_tokens, 0.0)] * num_requests
    task = _task(plan, model, requests, None if plan.prompts is None else plan.prompts[:1] * num_requests)
    errors = [answer.error for answer in await run_task(task, time.monotonic) if answer.error is not None]
    if errors:
        raise StartupError(f"--num-warmups: a request failed: {errors[0]}")


def read_plan(flags: argparse.Namespace) -> Plan:
    """Check the flags; a dataset's requests are added later. Raises StartupError that names the flag."""
    if (flags.trace is None) == (flags.dataset_name is None):
        raise StartupError("--trace: give it or --dataset-name")
    if flags.trace is not None and (flags.save_result or flags.goodput):
        raise StartupError("--save-result, --goodput: not with --trace (--out, --slo-ttft-ms and --slo-gap-ms)")
    is_chat = flags.backend == CHAT_BACKEND
    if flags.endpoint not in (None, CHATS if is_chat else COMPLETIONS):
        raise StartupError(f"--endpoint: {flags.endpoint} is not of --backend {flags.backend or 'vllm'}")
    if is_chat and flags.trace is not None:
        raise StartupError(f"--backend: {CHAT_BACKEND} needs texts (--dataset-name)")
    if flags.trace is not None and flags.rate is None:
        raise StartupError("--rate: missing")
    host = f"[{flags.asked_host}]" if ":" in flags.asked_host else flags.asked_host
    url = flags.url or f"http://{host}:{flags.asked_port}"
    parts = _url_parts(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.path not in ("", "/"):
        raise StartupError(f"--url: {url!r} is not of the form http://host:port")
    requests = [] if flags.trace is None else read_trace(flags.trace)
    if flags.num_requests is not None:
        requests = requests[: whole_number("--num-requests", flags.num_requests)]
    limit = flags.max_concurrency
    limit = None if limit is None else whole_number("--max-concurrency", limit)
    num_clients = whole_number("--clients", flags.clients, high=64)
    keys = (flags.shown_key or os.environ.get(API_KEY_VARIABLE) or "").split(",")
    return Plan(
        url=f"{parts.scheme}://{parts.netloc}",
        api_key=keys[0].strip() or None,
        rate=read_rate(flags) if flags.trace is None else positive_number("--rate", flags.rate),
        num_clients=num_clients if limit is None else min(num_clients, max(1, limit // OPEN_PER_CLIENT)),
        max_seconds=positive_number("--max-seconds", flags.max_seconds, high=86400),
        slo_ttft_ms=positive_number("--slo-ttft-ms", flags.slo_ttft_ms),
        slo_gap_ms=positive_number("--slo-gap-ms", flags.slo_gap_ms),
        vocab_size=whole_number("--vocab-size", flags.vocab_size),
        requests=requests,
        ignore_eos=flags.ignore_eos or flags.trace is not None,
        max_concurrency=limit,
    )


def _url_parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed here
    except ValueError as error:
        raise StartupError(f"--url: {url!r}: {error}") from None
    return parts


def summarize(plan: Plan, answers: Sequence[Answer]) -> ServeFigures:
    whole = [answer for answer in answers if answer.error is None]
    ends_s = [each.arrival / plan.rate + answer.end_s for each, answer in zip(plan.requests, answers, strict=True)]
    total_s = max(ends_s)
    num_good = sum(_is_good(plan, answer) for answer in whole)
    return ServeFigures(
        rate=plan.rate,
        num_requests=len(answers),
        sample_s=(plan.requests[-1].arrival - plan.requests[0].arrival) / plan.rate,
        num_errors=len(answers) - len(whole),
        total_s=total_s,
        output_tokens_per_s=sum(answer.num_tokens for answer in whole) / total_s,
        requests_per_s=len(whole) / total_s,
        goodput_per_s=num_good / total_s,
        good_share=num_good / len(answers),
        ttft_ms=Spread.of([1e3 * answer.chunks_s[0] for answer in whole if answer.chunks_s]),
        gap_ms=Spread.of([gap_ms for answer in whole for gap_ms in _gaps_ms(answer)]),
        client_lag_ms=Spread.of([1e3 * answer.sent_s for answer in answers]),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )


def _is_good(plan: Plan, answer: Answer) -> bool:
    if not answer.chunks_s or 1e3 * answer.chunks_s[0] > plan.slo_ttft_ms:
        return False
    mean_gap_ms = 1e3 * (answer.chunks_s[-1] - answer.chunks_s[0]) / max(1, len(answer.chunks_s) - 1)
    return mean_gap_ms <= plan.slo_gap_ms


def _gaps_ms(answer: Answer) -> list[float]:
    return [1e3 * (later - earlier) for earlier, later in pairwise(answer.chunks_s)]


async def drive(plan: Plan, model: str) -> list[Answer]:
    """Return all answers, in the plan's order."""
    clients: list[asyncio.subprocess.Process] = []
    try:
        for number in range(plan.num_clients):
            clients.append(await _start_client(plan, model, number))
        async with asyncio.timeout(plan.max_seconds + GRACE_S):
            lines = await _let_run(clients)
        shares = [[Answer(**answer) for answer in json.loads(line)] for line in lines]
    except BaseException as error:
        for client in clients:
            if client.returncode is None:
                client.kill()
        if not isinstance(error, TimeoutError | ValueError | OSError | asyncio.IncompleteReadError):
            raise
        raise StartupError(f"serve: a client process ended without an answer: {error}") from None
    finally:
        for client in clients:
            await client.wait()
    return [shares[number % len(shares)][number // len(shares)] for number in range(len(plan.requests))]


async def _let_run(clients: Sequence[asyncio.subprocess.Process]) -> list[bytes]:
    outputs = [client.stdout for client in clients if client.stdout is not None]
    await asyncio.gather(*(output.readuntil(b"ready\n") for output in outputs))
    start = f"{time.monotonic() + START_DELAY_S!r}\n".encode()
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(start)
    return await asyncio.gather(*(output.readline() for output in outputs))


async def first_model(plan: Plan) -> str:
    headers, timeout = _headers(plan), aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
            http.get(f"{plan.url}/v1/models", allow_redirects=False) as response,
        ):
            if response.status != 200:
                hint = " (name the model with --model)" if response.status in (404, 405) else ""
                raise StartupError(f"--url: {plan.url}/v1/models answers {response.status}{hint}")
            return str((await response.json())["data"][0]["id"])
    except aiohttp.ClientConnectorError as error:
        raise StartupError(f"--url: {plan.url} cannot be reached: {unreachable(error)}") from None
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise StartupError(f"--url: {plan.url} lists no model: {error or type(error).__name__}") from None


def _headers(plan: Plan) -> dict[str, str]:
    return {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}


def _task(
    plan: Plan, model: str, requests: list[tuple[int, int, int, float]], prompts: list[list[int]] | list[str] | None
) -> Task:
    return Task(
        plan.url,
        plan.api_key,
        model,
        plan.vocab_size,
        plan.max_seconds,
        requests,
        prompts=prompts,
        ignore_eos=plan.ignore_eos,
    )


async def _start_client(plan: Plan, model: str, number: int) -> asyncio.subprocess.Process:
    share = [
        (index, each.num_prompt_tokens, each.num_output_tokens, each.arrival / plan.rate)
        for index, each in enumerate(plan.requests)
        if index % plan.num_clients == number
    ]
    limit, num_clients = plan.max_concurrency, plan.num_clients
    prompts = None if plan.prompts is None else plan.prompts[number::num_clients]
    task = _task(plan, model, share, prompts)
    if limit is not None:
        task = replace(task, max_concurrency=limit // num_clients + (number < limit % num_clients))
    process = await asyncio.create_subprocess_exec(
        *python_script("load_client"),
        env=script_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=ANSWER_LINE_BYTES,
        start_new_session=True,  # Ctrl-C is handled here
        preexec_fn=die_with_parent,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
    return process


def _shown(value: float | int | Spread | None) -> str:
    return f"{value}  (p50 / p90 / p99)" if isinstance(value, Spread) else shown(value)


def _figure(plan: Plan, answers: Sequence[Answer]) -> Figure:
    whole = [answer for answer in answers if answer.error is None and answer.chunks_s]
    measured = {
        "time to the first token": [1e3 * answer.chunks_s[0] for answer in whole],
        "gap between chunks": [gap_ms for answer in whole for gap_ms in _gaps_ms(answer)],
    }
    shares = np.linspace(0, 1, CURVE_POINTS)
    panels = []
    for title, values in measured.items():
        curve = np.quantile(values, shares).tolist() if values else []
        series = {"label": title, "x": curve, "y": shares.tolist()[: len(curve)]}
        panels.append({"kind": "steps", "title": title, "x": "ms", "y": "share of all", "series": [series]})
    return {"title": f"{plan.rate:g} requests/s", "panels": panels}

"""`quire bench`: the engine alone, offline, as fast as it goes."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from model.ops.interface import Array, Ops
from model.sampling_params import SamplingParams
from service.cli.table import print_table
from service.config import Settings
from service.engine.build import BuiltEngine, build_engine
from service.engine.sequence import Request
from service.errors import StartupError

METERED_STEPS = 16
"""Attention is timed in one step of so many: the events themselves cost time."""


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("engine",), help="engine: a closed batch, straight into the engine")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        required=True,
        help="JSON with requests: [{prompt_tokens, output_tokens}, ...]",
    )
    parser.add_argument("--num-requests", type=int, metavar="N", help="only the first N requests of the trace")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures there, as JSON")


def run_bench(settings: Settings, flags: argparse.Namespace) -> int:
    meter: AttentionMeter | None = None

    def metered(ops: Ops) -> Ops:
        nonlocal meter
        meter = AttentionMeter(ops)
        return meter

    lengths = _read_trace(flags.trace)[: flags.num_requests]
    start_s = time.perf_counter()
    built = build_engine(settings, progress=True, wrap_ops=metered)
    built_s = time.perf_counter() - start_s
    figures = measure(built, meter, lengths, engine_start_s=built_s)
    print_table([(name.replace("_", " "), _shown(value)) for name, value in asdict(figures).items()])
    if flags.out:
        flags.out.write_text(json.dumps(_record(settings, flags, built, figures), indent=2) + "\n")
    return 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a closed batch showed. Times are of the host's clock around whole steps."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    engine_start_s: float
    total_s: float
    output_tokens_per_s: float
    num_steps: int
    step_p50_ms: float
    step_p99_ms: float
    mean_running: float
    attention_gb_per_s: float  # keys and values that decode attention read, over its time on the device
    kv_waste_ratio: float  # slots held and empty over slots held, mean over the steps
    num_preemptions: int


class AttentionMeter:
    """An `Ops` that times decode attention while `is_on`, and is the backend it wraps in all else."""

    def __init__(self, ops: Ops):
        self._ops = ops
        self._spans: list[tuple[object, object]] = []
        self._reads: list[tuple[Array, int]] = []
        self.is_on = False

    def __getattr__(self, name: str):
        return getattr(self._ops, name)

    def paged_decode_attention(self, q, kv, layer, block_tables, context_lens, scale, window, out) -> None:
        """See Ops."""
        if not self.is_on:
            self._ops.paged_decode_attention(q, kv, layer, block_tables, context_lens, scale, window, out)
            return
        begin = self._ops.mark()
        self._ops.paged_decode_attention(q, kv, layer, block_tables, context_lens, scale, window, out)
        self._spans.append((begin, self._ops.mark()))
        _, _, halves, num_kv_heads, _, head_dim = kv.shape
        self._reads.append((context_lens, halves * num_kv_heads * head_dim * kv.dtype.itemsize))

    def bytes_per_s(self) -> float:
        """Over all that was timed; 0 if nothing was."""
        seconds = sum(self._ops.elapsed_s(begin, end) for begin, end in self._spans)
        lengths = {id(array): int(self._ops.download(array).sum()) for array, _ in self._reads}
        read = sum(lengths[id(array)] * token_bytes for array, token_bytes in self._reads)
        return read / seconds if seconds else 0.0


def measure(
    built: BuiltEngine, meter: AttentionMeter, lengths: list[tuple[int, int]], *, engine_start_s: float
) -> Figures:
    """Run requests of these (prompt, output) lengths to their ends, all given at once."""
    engine, num_prompt_tokens = built.engine, 0
    random = np.random.default_rng(0)
    for number, (num_prompt, num_output) in enumerate(lengths):
        num_prompt = min(num_prompt, built.limits.max_model_len - num_output)
        num_prompt_tokens += num_prompt
        prompt = tuple(random.integers(0, built.config.vocab_size, num_prompt).tolist())
        wishes = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt=prompt, sampling=wishes))
    step_times_s, waste, running, num_outputs = [], [], [], 0
    before = engine.stats()
    start_s = time.perf_counter()
    while engine.has_work:
        meter.is_on = len(step_times_s) % METERED_STEPS == METERED_STEPS - 1
        step_start_s = time.perf_counter()
        engine.step()
        step_times_s.append(time.perf_counter() - step_start_s)
        num_outputs += len(engine.take_outputs())
        stats = engine.stats()
        if stats.num_slots_held:
            waste.append(1 - stats.num_slots_filled / stats.num_slots_held)
            running.append(stats.num_running)
    total_s = time.perf_counter() - start_s
    return Figures(
        num_requests=len(lengths),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_outputs,
        engine_start_s=engine_start_s,
        total_s=total_s,
        output_tokens_per_s=num_outputs / total_s,
        num_steps=len(step_times_s),
        step_p50_ms=1e3 * statistics.median(step_times_s),
        step_p99_ms=1e3 * float(np.percentile(step_times_s, 99)),
        mean_running=statistics.fmean(running),
        attention_gb_per_s=meter.bytes_per_s() / 1e9,
        kv_waste_ratio=statistics.fmean(waste),
        num_preemptions=engine.stats().num_preemptions - before.num_preemptions,
    )


def _read_trace(path: Path) -> list[tuple[int, int]]:
    try:
        requests = json.loads(path.read_text())["requests"]
        lengths = [(int(request["prompt_tokens"]), int(request["output_tokens"])) for request in requests]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"--trace: {path} is no trace: {error}") from None
    if not lengths or min(map(min, lengths)) < 1:
        raise StartupError(f"--trace: {path}: requests have at least one prompt and one output token")
    return lengths


def _record(settings: Settings, flags: argparse.Namespace, built: BuiltEngine, figures: Figures) -> dict:
    ask = ["git", "-c", "safe.directory=*", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or None,
        "device": built.ops.device_name,
        "model": settings.model_config or settings.model.name,
        "dtype": str(built.ops.dtype),
        "trace": flags.trace.stem,
        "num_blocks": built.memory.num_blocks,
        "max_num_seqs": built.limits.max_num_seqs,
        "max_num_batched_tokens": built.limits.max_num_batched_tokens,
        **asdict(figures),
    }


def _shown(value: float | int) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"

"""`quire bench engine`: the engine alone, offline, at full speed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from service.bench.branches import BranchFigures, BranchWork, measure_branches
from service.bench.copies import CopyFigures, Pace, PacedFigures, measure_copies
from service.bench.engine_measures import (
    WHOLE_STEPS,
    DecodeFigures,
    PrefillFigures,
    PrefixFigures,
    Step,
    measure_decode,
    measure_prefill,
    measure_prefix,
    measure_trace,
)
from service.bench.flag_values import positive_number, product, whole_number, whole_numbers
from service.bench.preemption_modes import ModeFigures, measure_modes, mixed_lengths
from service.bench.report import Figure, write_report
from service.bench.trace import read_trace
from service.cli.table import print_grid, print_table, shown
from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.errors import StartupError
from service.garbage import freeze_heap


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("work", "one of --trace, --batch, --prefill, --prefix, --prompts, --preemption")
    work.add_argument("--trace", type=Path, metavar="FILE", help="run all requests of a trace at once")
    work.add_argument("--num-requests", metavar="N", help="first N requests of the trace (default: all)")
    work.add_argument("--batch", metavar="N,...", help="decode steps of N sequences, one N after another")
    work.add_argument("--context", metavar="N", help="mean tokens per sequence in --batch (default: 1100)")
    work.add_argument("--steps", metavar="N", help="timed decode steps in --batch (default: 64)")
    work.add_argument(
        "--copies", action="store_true", help="run --batch also during full-speed copies to the host and back"
    )
    work.add_argument(
        "--copy-blocks",
        metavar="OxI,...",
        help="with --copies: also with O blocks out and I in per step (default: none)",
    )
    work.add_argument("--prefix", metavar="NxL", help="N users with a shared prefix of L tokens")
    work.add_argument("--own", metavar="N", help="tokens of each prompt after the --prefix (default: 64)")
    work.add_argument("--output", metavar="N", help="tokens per answer (default: --prefix 64, --prompts 128)")
    work.add_argument(
        "--preemption", metavar="N", help="N requests of mixed lengths in too small a pool, in each preemption mode"
    )
    work.add_argument("--pool-share", metavar="X", help="size of that pool, as a share of the need (default: 0.4)")
    work.add_argument("--slower-bus", metavar="N", help="copy each block N times, as over a slower bus (default: 1)")
    work.add_argument("--prefill", metavar="NxL", help="prefill N prompts of L tokens at once")
    work.add_argument("--prompts", metavar="NxL", help="answer N prompts of L tokens in branches")
    work.add_argument("--n", metavar="N,...", help="samples per prompt of --prompts, one N after another (default: 1)")
    work.add_argument(
        "--beam-width", metavar="N,...", help="beams per prompt of --prompts, one N after another (default: none)"
    )


def run_engine_bench(settings: Settings, flags: argparse.Namespace) -> int:
    """Run the bench. Return 0. Raises StartupError for conflicting flags or work that does not fit the engine."""
    works = (flags.trace, flags.batch, flags.prefill, flags.prefix, flags.prompts, flags.preemption)
    if sum(work is not None for work in works) != 1:
        names = "--trace FILE, --batch N, --prefill NxL, --prefix NxL, --prompts NxL and --preemption N"
        raise StartupError(f"engine: exactly one is required ({names})")
    for flag, value, owner in (
        ("--num-requests", flags.num_requests, flags.trace),
        ("--context", flags.context, flags.batch),
        ("--steps", flags.steps, flags.batch),
        ("--copies", flags.copies or None, flags.batch),
        ("--copy-blocks", flags.copy_blocks, flags.copies or None),
        ("--own", flags.own, flags.prefix),
        ("--output", flags.output, flags.prefix or flags.prompts),
        ("--n", flags.n, flags.prompts),
        ("--beam-width", flags.beam_width, flags.prompts),
        ("--pool-share", flags.pool_share, flags.preemption),
        ("--slower-bus", flags.slower_bus, flags.preemption),
    ):
        if value is not None and owner is None:
            raise StartupError(f"{flag}: not supported with this work")
    if flags.trace is not None:
        return _run_trace(settings, flags)
    if flags.prefix is not None:
        return _run_prefix(settings, flags)
    if flags.prompts is not None:
        return _run_branches(settings, flags)
    if flags.preemption is not None:
        return _run_modes(settings, flags)
    if flags.copies:
        return _run_copies(settings, flags)
    return _run_decode(settings, flags) if flags.batch is not None else _run_prefill(settings, flags)


def _run_trace(settings: Settings, flags: argparse.Namespace) -> int:
    requests = read_trace(flags.trace)
    if flags.num_requests is not None:
        requests = requests[: whole_number("--num-requests", flags.num_requests)]
    built, start_s = _build(settings)
    figures, course = measure_trace(built, requests, engine_start_s=start_s)
    print_table([(name.replace("_", " "), shown(value)) for name, value in asdict(figures).items()])
    record = {**_describe(settings, built), "trace": flags.trace.stem, **asdict(figures)}
    write_report(flags, record, _course_figure(course, f"{flags.trace.stem} on {built.ops.device_name}"))
    return 0


def _run_decode(settings: Settings, flags: argparse.Namespace) -> int:
    batches = whole_numbers("--batch", flags.batch)
    context = whole_number("--context", flags.context or "1100")
    num_steps = whole_number("--steps", flags.steps or "64")
    settings = replace(settings, max_prefill_chunk=WHOLE_STEPS)  # only steps after the prompts are timed
    built, start_s = _build(settings, least_seqs=max(batches))
    rows = [measure_decode(built, batch, context, num_steps) for batch in batches]
    _print_rows(rows)
    record = {**_describe(settings, built), "engine_start_s": start_s, "decode": [asdict(row) for row in rows]}
    panel: dict[str, Any] = {"kind": "line", "title": "a decode step", "x": "sequences", "y": "ms", "series": []}
    for label in ("step_p50_ms", "step_p99_ms"):
        curve = {"x": list(batches), "y": [asdict(row)[label] for row in rows]}
        panel["series"].append({"label": label.replace("_", " "), **curve})
    write_report(flags, record, {"title": f"context {context}, {built.ops.device_name}", "panels": [panel]})
    return 0


def _run_prefix(settings: Settings, flags: argparse.Namespace) -> int:
    num_users, length = product("--prefix", flags.prefix)
    own, output = (whole_number(f"--{name}", getattr(flags, name) or "64") for name in ("own", "output"))
    if not settings.enable_prefix_caching:
        raise StartupError("--prefix: --no-enable-prefix-caching leaves nothing to measure")
    built, start_s = _build(settings, least_seqs=num_users)
    return _report(settings, flags, built, start_s, measure_prefix(built, num_users, length, own, output))


def _run_copies(settings: Settings, flags: argparse.Namespace) -> int:
    batch, context = whole_number("--batch", flags.batch), whole_number("--context", flags.context or "1100")
    num_steps = whole_number("--steps", flags.steps or "64")
    paces = [Pace(*product("--copy-blocks", part)) for part in (flags.copy_blocks or "").split(",") if part]
    settings = replace(settings, max_prefill_chunk=WHOLE_STEPS)
    built, start_s = _build(settings, least_seqs=batch)
    figures = measure_copies(built, batch, context, num_steps, paces)
    _print_rows(figures.paced)
    return _report(settings, flags, built, start_s, figures)


def _report(
    settings: Settings,
    flags: argparse.Namespace,
    built: BuiltEngine,
    start_s: float,
    figures: PrefixFigures | CopyFigures,
) -> int:
    values = asdict(figures)
    single = {name: value for name, value in values.items() if not isinstance(value, list)}
    print_table([(name.replace("_", " "), shown(value)) for name, value in single.items()])
    times_ms = {name: value for name, value in values.items() if name.endswith("_ms")}
    bars = {"label": "ms", "x": list(times_ms), "y": list(times_ms.values())}
    panel = {"kind": "bars", "title": "", "x": "ms", "y": "", "series": [bars]}
    record = {**_describe(settings, built), "engine_start_s": start_s, **values}
    write_report(flags, record, {"title": built.ops.device_name, "panels": [panel]})
    return 0


def _run_prefill(settings: Settings, flags: argparse.Namespace) -> int:
    num_prompts, length = product("--prefill", flags.prefill)
    built, start_s = _build(settings, least_seqs=num_prompts)
    figures, rounds_s = measure_prefill(built, num_prompts, length)
    _print_rows([figures])
    record = {**_describe(settings, built), "engine_start_s": start_s, **asdict(figures)}
    rates = [num_prompts * length / round_s for round_s in rounds_s]
    bars = {"label": "rounds", "x": [f"round {number}" for number in range(1, len(rates) + 1)], "y": rates}
    panel = {"kind": "bars", "title": "", "x": "prompt tokens/s", "y": "", "series": [bars]}
    write_report(flags, record, {"title": f"prefill {num_prompts} x {length}", "panels": [panel]})
    return 0


def _run_branches(settings: Settings, flags: argparse.Namespace) -> int:
    num_prompts, length = product("--prompts", flags.prompts)
    num_output = whole_number("--output", flags.output or "128")
    sampled = "1" if flags.n is None and flags.beam_width is None else flags.n
    counts = [("sampled", count) for count in (whole_numbers("--n", sampled) if sampled else ())]
    if flags.beam_width is not None:
        counts += [("beams", count) for count in whole_numbers("--beam-width", flags.beam_width)]
    built, start_s = _build(settings, least_seqs=num_prompts * max(count for _, count in counts))
    sizes = {"num_prompts": num_prompts, "num_prompt": length, "num_output": num_output}
    rows = [measure_branches(built, BranchWork(method=method, num_branches=count, **sizes)) for method, count in counts]
    _print_rows(rows)
    record = {**_describe(settings, built), "engine_start_s": start_s, "branches": [asdict(row) for row in rows]}
    names = [f"{row.method} {row.num_branches}" for row in rows]
    bars = {"label": "step", "x": names, "y": [row.step_mean_ms for row in rows]}
    panel = {"kind": "bars", "title": "a step", "x": "ms", "y": "", "series": [bars]}
    write_report(flags, record, {"title": f"{num_prompts} x {length}, {built.ops.device_name}", "panels": [panel]})
    return 0


def _run_modes(settings: Settings, flags: argparse.Namespace) -> int:
    lengths = mixed_lengths(whole_number("--preemption", flags.preemption))
    pool_share = positive_number("--pool-share", flags.pool_share or "0.4")
    built, start_s = _build(settings)
    prefix_caching = settings.enable_prefix_caching
    bus_times = whole_number("--slower-bus", flags.slower_bus or "1")
    num_blocks, rows = measure_modes(built, lengths, pool_share, prefix_caching=prefix_caching, bus_times=bus_times)
    _print_rows(rows)
    work = {"num_requests": len(lengths), "pool_share": pool_share, "prefix_caching": prefix_caching}
    work |= {"max_model_len": built.limits.max_model_len, "bus_times_slower": bus_times}
    record = {**_describe(settings, built), "num_blocks": num_blocks, "engine_start_s": start_s, **work}
    bars = {"label": "mode", "x": [row.mode for row in rows], "y": [row.output_tokens_per_s for row in rows]}
    panel = {"kind": "bars", "title": "", "x": "output tokens/s", "y": "", "series": [bars]}
    figure = {"title": f"{num_blocks} blocks, {built.ops.device_name}", "panels": [panel]}
    write_report(flags, {**record, "modes": [asdict(row) for row in rows]}, figure)
    return 0


def _build(settings: Settings, least_seqs: int = 1) -> tuple[BuiltEngine, float]:
    settings = replace(settings, max_num_seqs=max(settings.max_num_seqs, least_seqs))
    start_s = time.perf_counter()
    built = build_engine(settings, progress=True)
    freeze_heap()
    return built, time.perf_counter() - start_s


def _print_rows(rows: Sequence[DecodeFigures | PrefillFigures | BranchFigures | ModeFigures | PacedFigures]) -> None:
    singles = [{name: value for name, value in asdict(row).items() if not isinstance(value, list)} for row in rows]
    names = [name.replace("_", " ") for name in singles[0]]
    print_grid(names, [[shown(value) for value in single.values()] for single in singles])


def _describe(settings: Settings, built: BuiltEngine) -> dict[str, Any]:
    return {
        "bench": "engine",
        "device": built.ops.device_name,
        "model": settings.model_config or (settings.model and settings.model.name),
        "dtype": str(built.ops.dtype),
        "quantization": settings.quantization,
        "weight_bytes": built.executor.model.weights.num_bytes,
        "num_blocks": built.memory.num_blocks,
        "max_num_seqs": built.limits.max_num_seqs,
        "max_num_batched_tokens": built.limits.max_num_batched_tokens,
    }


def _course_figure(course: Sequence[Step], title: str) -> Figure:
    times_s = np.cumsum([step.seconds for step in course]).tolist()
    panels = [
        ("the steps", "ms", [1e3 * step.seconds for step in course]),
        ("sequences that run", "sequences", [step.num_running for step in course]),
    ]
    return {
        "title": title,
        "panels": [
            {"kind": "steps", "title": name, "x": "s", "y": y, "series": [{"label": name, "x": times_s, "y": values}]}
            for name, y, values in panels
        ],
    }

"""`quire bench`: the benches and their flags."""

from __future__ import annotations

import argparse
import dataclasses

from service.bench.engine import add_engine_flags, run_engine_bench
from service.bench.kernels import add_kernel_flags, run_kernel_bench
from service.bench.kv_policies.command import add_memory_flags, run_memory_bench
from service.bench.queue import add_queue_flags, run_queue_bench
from service.bench.report import add_report_flags, check_report_flags
from service.bench.serve import add_serve_flags, run_serve_bench
from service.config.settings import BENCH, Settings
from service.config.sources import add_flags

BENCHES = {
    "engine": (add_engine_flags, run_engine_bench, "measure the engine alone, offline: a trace, decode steps, prefill"),
    "kernels": (add_kernel_flags, run_kernel_bench, "measure every operation: time, rate, share of the ceiling"),
    "memory": (
        add_memory_flags,
        run_memory_bench,
        "compare paging with regions and static batches, on a trace",
    ),
    "queue": (add_queue_flags, run_queue_bench, "measure token events through one Redis, without a model"),
    "serve": (add_serve_flags, run_serve_bench, "measure a running service over HTTP, open loop"),
}


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add each bench's flags and, if it loads a model, the settings."""
    benches = parser.add_subparsers(dest="what", metavar="|".join(BENCHES), required=True)
    for name, (add_own_flags, _, help_text) in BENCHES.items():
        is_vllms = name == "serve"  # vLLM command lines abbreviate --random-input and --num-prompt
        bench = benches.add_parser(name, help=help_text, description=help_text, allow_abbrev=is_vllms)
        add_own_flags(bench)
        add_report_flags(bench)
        if name in ("queue", "serve"):
            bench.set_defaults(**{field.name: None for field in dataclasses.fields(Settings)})
        else:
            add_flags(bench, BENCH)


def run_bench(settings: Settings, flags: argparse.Namespace) -> int:
    """Run a bench. Return the exit status. Raises StartupError."""
    check_report_flags(flags)
    _, run, _ = BENCHES[flags.what]
    return run(settings, flags)

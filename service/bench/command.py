"""`quire bench`: the benches, and what each of them is asked with."""

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
    "engine": (add_engine_flags, run_engine_bench, "the engine alone, offline: a trace at once, decode steps, prefill"),
    "kernels": (add_kernel_flags, run_kernel_bench, "every operation of the model: time, rate, share of the ceiling"),
    "memory": (add_memory_flags, run_memory_bench, "paging against contiguous regions and static batches, on a trace"),
    "queue": (add_queue_flags, run_queue_bench, "one Redis, doors and workers without a model: token events a second"),
    "serve": (add_serve_flags, run_serve_bench, "a running service over HTTP: open loop, what clients see"),
}


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Each bench lists its own flags and, where it loads something itself, the settings of the verb."""
    benches = parser.add_subparsers(dest="what", metavar="|".join(BENCHES), required=True)
    for name, (add_own_flags, _, help_text) in BENCHES.items():
        bench = benches.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        add_own_flags(bench)
        add_report_flags(bench)
        if name in ("queue", "serve"):
            bench.set_defaults(**{field.name: None for field in dataclasses.fields(Settings)})
        else:
            add_flags(bench, BENCH)


def run_bench(settings: Settings, flags: argparse.Namespace) -> int:
    """The exit status; raises StartupError."""
    check_report_flags(flags)
    _, run, _ = BENCHES[flags.what]
    return run(settings, flags)

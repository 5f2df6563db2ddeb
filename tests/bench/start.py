"""Time from the start of an engine's process to its first tokens, part by part.

    python -m tests.bench.start --model-config llama-3.1-8b [--quantization fp8 ...] [--rounds 2] [--out FILE]
    python -m tests.bench.start --model DIR [--load-format dummy ...]

Takes the settings of `quire bench engine`; a shape gets random weights. Each start is its own process: the first finds
no compiled kernels, the others its cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps

from model.cuda_graphs import StepGraphs
from model.weights.loader import AllocatedModel
from service.bench.flag_values import whole_number
from service.bench.report import (
    add_report_flags,
    check_report_flags,
    python_script,
    run_script,
    script_environment,
    write_report,
)
from service.cli.table import print_grid
from service.config.settings import BENCH, Settings
from service.config.sources import add_flags, read_settings, to_flags
from service.engine import build
from service.errors import StartupError

TIMEOUT_S = 300

PARTS = {
    "device": (build, "open_devices"),
    "weights, kernels": (build, "size_engine"),
    "of these finding kernels": (build, "run_all_kernels"),
    "of these the weights": (AllocatedModel, "load"),
    "graphs": (StepGraphs, "capture"),
    "of these timing": (StepGraphs, "_measured"),
    "bus, prompts": (build, "calibrate_swap_cost"),
    "first tokens": (build, "_check_generation"),
}
"""Name to the module that calls the function."""

RECORDED = ("max_num_seqs", "load_format", "quantization", "kv_cache_dtype", "enable_lora")
"""Settings in the report."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start, in seconds."""

    imports_s: float  # from the process's start to the end of imports
    parts_s: dict[str, float]
    all_s: float  # from the process's start to the first generated tokens
    device: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", default="2", help="starts with kernels compiled before")
    parser.add_argument("--enable-lora", action="store_true", help="with slots for adapters")
    add_report_flags(parser)
    add_flags(parser, BENCH)
    parser.set_defaults(max_num_seqs="512")
    flags = parser.parse_args()
    check_report_flags(flags)
    settings, num_rounds = read_settings(BENCH, flags, os.environ), whole_number("--rounds", flags.rounds)
    if settings.model_config is not None:
        settings = replace(settings, load_format="dummy")
    settings = replace(settings, enable_lora=flags.enable_lora)
    starts = measure(settings, num_rounds)
    names = ["nothing compiled", *["compiled before"] * num_rounds]
    print_starts(names, starts)
    bars = {"label": "s", "x": names, "y": [start.all_s for start in starts]}
    panel = {"kind": "bars", "title": "", "x": "s to the first tokens", "y": "", "series": [bars]}
    record = {"bench": "start", "model": settings.model_config or (settings.model and settings.model.name)}
    record |= {name: getattr(settings, name) for name in RECORDED}
    rows = [{"kernels": name, **asdict(start)} for name, start in zip(names, starts, strict=True)]
    write_report(flags, {**record, "starts": rows}, {"title": f"start on {starts[0].device}", "panels": [panel]})


def measure(settings: Settings, num_rounds: int) -> list[Start]:
    """Start once with an empty kernel cache, then `num_rounds` times with its content. Raises StartupError."""
    flags, starts = to_flags(settings, BENCH), []
    if settings.enable_lora:
        flags.append("--enable-lora")
    with tempfile.TemporaryDirectory() as cache:
        own = {"QUIRE_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"}  # NVRTC has one too
        environment = {**script_environment(), **own}
        for _ in range(1 + num_rounds):
            try:
                command = python_script("start_once", *flags, package="tests.bench")
                done = subprocess.run(command, env=environment, stdout=-1, timeout=TIMEOUT_S, check=True)
            except subprocess.SubprocessError as error:
                raise StartupError(f"start: {error}") from None
            starts.append(Start(**json.loads(done.stdout.splitlines()[-1])))
    return starts


def start_here(settings: Settings) -> Start:
    """Start in this process, which must be fresh."""
    imports_s, parts_s = _process_age_s(), dict.fromkeys(PARTS, 0.0)
    for name, (owner, function) in PARTS.items():
        setattr(owner, function, _timed(getattr(owner, function), name, parts_s))
    built = build.build_engine(settings, progress=False)
    return Start(imports_s=imports_s, parts_s=parts_s, all_s=_process_age_s(), device=built.ops.device_name)


def _timed(function, name: str, parts_s: dict[str, float]):
    @wraps(function)
    def work(*args, **keywords):
        begin_s = time.perf_counter()
        try:
            return function(*args, **keywords)
        finally:
            parts_s[name] += time.perf_counter() - begin_s

    return work


def _process_age_s() -> float:
    """Return the process's age, by the kernel, to a hundredth of a second."""
    with open("/proc/self/stat", encoding="ascii") as stat:
        begin_ticks = int(stat.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begin_ticks / os.sysconf("SC_CLK_TCK")


def print_starts(names: Sequence[str], starts: Sequence[Start]) -> None:
    """Print a row per start, in seconds."""
    rows = []
    for name, start in zip(names, starts, strict=True):
        rows.append((name, *(f"{seconds:.2f}" for seconds in (start.imports_s, *start.parts_s.values(), start.all_s))))
    print_grid(("", "imports", *PARTS, "all"), rows)


if __name__ == "__main__":
    run_script(main)

"""`quire bench kernels`: each operation's time compared with the minimum for its bytes and FLOPs on this device."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

import numpy as np

from model.errors import ModelError
from model.ops.backend import open_ops
from model.ops.interface import Ops
from model.ops.weight import Weight
from service.bench.cases.expert_cases import ExpertCases
from service.bench.cases.kernel_cases import CPU_SIZES, GPU_SIZES, Case, KernelCases, Launch, Sizes
from service.bench.report import Figure, python_script, script_environment, write_report
from service.cli.table import print_grid, shown
from service.config.settings import Settings
from service.engine.build import read_model_config
from service.errors import StartupError

MAX_SETS = 64
ROUNDS = 9
ROUND_S = 2e-3
"""Approximate duration of a round, long enough to hide its launch."""

GPU_PRESET = "llama-3.1-8b"
"""Default shape on a GPU; on a CPU it is the demo model's."""

PEER_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The device's rates, measured in the same run."""

    copy_bytes_per_s: float  # read plus written
    gemm_flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """Figures of one case."""

    op: str
    size: str
    time_us: float
    gb_per_s: float
    tflops_per_s: float
    ceiling_share: float  # minimum time for its bytes and FLOPs over measured time
    bound: str  # the binding limit: "bytes" | "flops"
    torch_us: float | None
    torch_ratio: float | None  # torch's time over ours


def add_kernel_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="OP", help="operations whose name contains OP (default: all)")


def run_kernel_bench(settings: Settings, flags: argparse.Namespace) -> int:
    """Run the bench. Return 0. Raises StartupError."""
    ops, cases, of_experts = _open(settings, is_model_named=flags.model is not None)
    chosen = [case for case in chain(cases.all(), of_experts) if flags.only is None or flags.only in case.op]
    if not chosen:
        raise StartupError(f"--only: no operation's name contains {flags.only!r}")
    ceilings = measure_ceilings(ops)
    print(
        f"{ops.device_name}, {ops.dtype}: copies {ceilings.copy_bytes_per_s / 1e9:,.0f} GB/s (read and written), "
        f"a large product {ceilings.gemm_flops_per_s / 1e12:,.3g} TFLOP/s\n"
    )
    seconds = [seconds_of(ops, _launches(case, cases.sizes)) for case in chosen]
    peers_s = _peer_seconds(ops, chosen)
    figures = [figures_of(*measured, ceilings) for measured in zip(chosen, seconds, peers_s, strict=True)]
    _print(figures)
    record = {"bench": "kernels", "device": ops.device_name, "dtype": str(ops.dtype), **asdict(ceilings)}
    record["kv_dtype"] = str(ops.kv_dtype)
    write_report(flags, {**record, "kernels": [asdict(each) for each in figures]}, _figure(ops, figures))
    return 0


def measure_ceilings(ops: Ops) -> Ceilings:
    """Measure the device's copy and product rates."""
    copied_bytes, size = (1 << 30, 8192) if ops.name == "cuda" else (64 << 20, 1024)
    source, target = (ops.upload(np.ones(copied_bytes, np.uint8)) for _ in range(2))
    stream = getattr(ops, "stream", None)  # CuPy's; the CPU backend has none

    def copy() -> None:
        if ops.name == "cuda":
            target.data.copy_from_device_async(source.data, copied_bytes, stream)
        else:
            np.copyto(target, source)

    square = np.resize(np.random.default_rng(0).standard_normal(1_000_003).astype(ops.dtype), (size, size))
    x, weight = ops.upload(square), ops.upload(square)
    return Ceilings(
        copy_bytes_per_s=2 * copied_bytes / _median_s(ops, copy),  # not in a graph, where the driver copies more slowly
        gemm_flops_per_s=2 * size**3 / seconds_of(ops, [lambda: ops.linear(x, Weight(weight))]),
    )


def seconds_of(ops: Ops, launches: Sequence[Launch]) -> float:
    """Return device seconds per launch: median of warm rounds over all of them, captured as one graph."""

    def work() -> None:
        for launch in launches:
            launch()

    with ops.scratch():
        return _median_s(ops, ops.capture(work)) / len(launches)


def _median_s(ops: Ops, work: Callable[[], None]) -> float:
    once_s = _round_s(ops, work, 1)
    repeats = min(100, math.ceil(ROUND_S / max(once_s, 1e-7)))
    return statistics.median(_round_s(ops, work, repeats) for _ in range(ROUNDS if once_s < 0.1 else 3))


def _round_s(ops: Ops, work: Callable[[], None], repeats: int) -> float:
    work()  # keeps the device busy while the host submits the timed launches
    begin = ops.record_event()
    for _ in range(repeats):
        work()
    return ops.elapsed_s(begin, ops.record_event()) / repeats


def _open(settings: Settings, is_model_named: bool) -> tuple[Ops, KernelCases, Iterable[Case]]:
    """Return a backend, its cases, and its expert cases (none for a dense model). Raises StartupError."""
    preset = settings.model_config
    try:
        dtype = read_model_config(replace(settings, load_format="dummy")).dtype
        ops = open_ops(settings.device, settings.dtype, dtype, settings.kv_cache_dtype)
    except ModelError as error:
        raise StartupError(str(error)) from None
    if ops.name == "cuda" and preset is None and not is_model_named:
        preset = GPU_PRESET
    config = read_model_config(replace(settings, model_config=preset, load_format="dummy"))
    sizes = GPU_SIZES if ops.name == "cuda" else CPU_SIZES
    of_experts: Iterable[Case] = ()
    if config.experts is not None:
        of_experts = ExpertCases(ops, config.experts, config.hidden_size, sizes.rows).all()
    return ops, KernelCases(ops, config, sizes, settings.block_size), of_experts


def _launches(case: Case, sizes: Sizes) -> list[Launch]:
    return [case.make(i) for i in range(min(MAX_SETS, math.ceil(sizes.rotated_bytes / case.num_bytes)))]


def _peer_seconds(ops: Ops, cases: Sequence[Case]) -> list[float | None]:
    """Return PyTorch's seconds for each case it supports, if it is installed and the device is a GPU."""
    asked = [number for number, case in enumerate(cases) if case.peer is not None]
    seconds: list[float | None] = [None] * len(cases)
    if ops.name != "cuda" or not asked or importlib.util.find_spec("torch") is None:
        return seconds
    request = json.dumps({"dtype": str(ops.dtype), "cases": [cases[number].peer for number in asked]})
    command, environment = python_script("torch_reference"), script_environment()
    try:
        answer = subprocess.run(
            command, input=request, text=True, env=environment, stdout=-1, timeout=PEER_TIMEOUT_S, check=True
        )
        answers = json.loads(answer.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"torch could not be measured: {error}\n")
        return seconds
    for number, answer_s in zip(asked, answers, strict=True):
        seconds[number] = answer_s
    return seconds


def figures_of(case: Case, seconds: float, peer_s: float | None, ceilings: Ceilings) -> KernelFigures:
    """Return the figures of a case that took `seconds` here and `peer_s` in torch."""
    bytes_s, flops_s = case.num_bytes / ceilings.copy_bytes_per_s, case.num_flops / ceilings.gemm_flops_per_s
    return KernelFigures(
        op=case.op,
        size=case.size,
        time_us=1e6 * seconds,
        gb_per_s=case.num_bytes / seconds / 1e9,
        tflops_per_s=case.num_flops / seconds / 1e12,
        ceiling_share=max(bytes_s, flops_s) / seconds,
        bound="bytes" if bytes_s >= flops_s else "flops",
        torch_us=None if peer_s is None else 1e6 * peer_s,
        torch_ratio=None if peer_s is None else peer_s / seconds,
    )


def _print(figures: Sequence[KernelFigures]) -> None:
    header = ("op", "size", "us", "GB/s", "TFLOP/s", "of ceiling", "by", "torch us", "torch / ours")
    rows = []
    for each in figures:
        rates = (each.time_us, each.gb_per_s, each.tflops_per_s or None)
        share = (f"{each.ceiling_share:.2f}", each.bound)
        peer = ("-" if value is None else f"{value:.4g}" for value in (each.torch_us, each.torch_ratio))
        rows.append((each.op, each.size, *map(shown, rates), *share, *peer))
    print_grid(header, rows)


def _figure(ops: Ops, figures: Sequence[KernelFigures]) -> Figure:
    names, shares = [f"{each.op}  {each.size}" for each in figures], [each.ceiling_share for each in figures]
    bars = {"label": "share", "x": names, "y": shares}
    panel = {"kind": "bars", "title": "", "x": "share of the measured ceiling", "y": "", "series": [bars]}
    return {"title": f"operations on {ops.device_name}", "panels": [panel]}

"""Profile the kernels of decode steps with PyTorch's profiler, which sees every kernel of the process.

    python -m tests.bench.step_profile --model-config llama-3.1-8b --batch 1,64,256,512 [--context N,...]
        [--tensor-parallel-size N] [--out FILE]

Random weights, and random keys and values instead of those of prompts. With several contexts, every batch is measured
with each that fits the pool, and the growth from a step to one of twice the batch or context is printed. Of several
ranks the first one's kernels are shown; a sum's time includes its wait for the peers. A script of its own, because only
it wants PyTorch, and that in the engine's process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from model.ops.interface import Ops
from service.bench.engine_measures import WHOLE_STEPS, randomize_cache, steady_decode
from service.bench.flag_values import whole_numbers
from service.bench.kernels import Ceilings, measure_ceilings
from service.bench.report import add_report_flags, check_report_flags, run_script, write_report
from service.cli.table import print_grid, shown
from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.errors import StartupError
from service.garbage import freeze_heap
from tests.bench.experts_in_use import bytes_of_products, experts_in_use
from tests.bench.step_growth import growth_of, report_growth
from tests.bench.step_table import KernelEvent, StepTable, table_of

PROFILED_STEPS = 8
TIMED_STEPS = 32


def main() -> None:
    """Needs a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-config")
    parser.add_argument(
        "--model", help="a folder, of tests.bench.sparse_folder for example, in place of --model-config"
    )
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--batch", default="1,64,256,512")
    parser.add_argument("--context", default="1100", help="mean tokens a sequence holds; several, one by one")
    add_report_flags(parser)
    flags = parser.parse_args()
    check_report_flags(flags)
    batches, contexts = whole_numbers("--batch", flags.batch), whole_numbers("--context", flags.context)
    torch.cuda.init()  # before the cache takes the memory
    named = replace(Settings(), model_config=flags.model_config, model=flags.model, quantization=flags.quantization)
    named = replace(named, load_format="dummy", device="cuda", tensor_parallel_size=flags.tensor_parallel_size)
    # no swap space: one batch's prefix cache must not be evicted to the host during the next
    settings = replace(named, max_num_seqs=max(batches), max_prefill_chunk=WHOLE_STEPS, swap_space=0.0)
    built = build_engine(settings, progress=True)
    freeze_heap()
    ceilings = ceilings_of(built.ops)
    randomize_cache(built)
    tables = []
    for batch, context in product(batches, contexts):
        try:
            tables.append(profile_decode(built, batch, context, ceilings))
        except StartupError as reason:
            print(f"batch {batch}, context {context}: {reason}")
            continue
        print_table(tables[-1])
    growth = growth_of(tables, built.config, built.ops.dtype.itemsize)
    report_growth(growth)
    record = {"bench": "step_profile", "device": built.ops.device_name, "model": flags.model_config or flags.model}
    record |= {"weights": built.executor.model.weights.layers[0].qkv.format}
    panel = {"kind": "bars", "title": "", "x": "us a step", "y": "", "series": []}
    for table in tables:
        bars = {"x": [row.op for row in table.rows], "y": [row.time_us for row in table.rows]}
        panel["series"].append({"label": f"batch {table.batch}, context {table.mean_context:.0f}", **bars})
    figure = {"title": f"a decode step on {built.ops.device_name}", "panels": [panel]}
    found = {"steps": [asdict(table) for table in tables], "growth": [asdict(row) for row in growth]}
    write_report(flags, {**record, **asdict(ceilings), **found}, figure)


def profile_decode(built: BuiltEngine, batch: int, context: int, ceilings: Ceilings) -> StepTable:
    """Profile steps of `batch` sequences with about `context` tokens each."""
    engine, config = built.engine, built.config
    with steady_decode(built, batch, context, PROFILED_STEPS + TIMED_STEPS, computes_prompts=False):
        timed_s, host_s = _timed(built)
        held = engine.stats().num_slots_filled
        events = _events(lambda: [engine.step() for _ in range(PROFILED_STEPS)], built)
        mean_context = (held + engine.stats().num_slots_filled) / 2 / batch
        in_use = experts_in_use(built)
    times, item = (1e6 * timed_s, 1e3 * host_s), built.ops.dtype.itemsize
    of_rank = bytes_of_products(built.executor.model, in_use)
    weight_bytes = {name: built.ops.num_ranks * num_bytes for name, num_bytes in of_rank.items()}
    return table_of(events, PROFILED_STEPS, batch, mean_context, *times, config, item, ceilings, weight_bytes, in_use)


def ceilings_of(ops: Ops) -> Ceilings:
    """Return the rates of all ranks together."""
    if ops.num_ranks == 1:
        return measure_ceilings(ops)
    one = measure_ceilings(ops.ranks[0])
    return Ceilings(
        copy_bytes_per_s=ops.num_ranks * one.copy_bytes_per_s, gemm_flops_per_s=ops.num_ranks * one.gemm_flops_per_s
    )


def _timed(built: BuiltEngine) -> tuple[float, float]:
    """Return seconds of a step, and of its host part without waits for the device."""
    collect, waited_s = built.executor.collect, 0.0

    def wait_first(launched):
        nonlocal waited_s
        begin_s = time.perf_counter()
        for fetch in launched.running.samples:
            fetch()
        waited_s += time.perf_counter() - begin_s
        return collect(launched)

    built.executor.collect = wait_first
    try:
        begin_s = time.perf_counter()
        for _ in range(TIMED_STEPS):
            built.engine.step()
            built.engine.drain_outputs()  # another thread handles the outputs
        total_s = time.perf_counter() - begin_s
    finally:
        del built.executor.collect
    return total_s / TIMED_STEPS, (total_s - waited_s) / TIMED_STEPS


def _events(work: Callable[[], object], built: BuiltEngine) -> list[KernelEvent]:
    """Return the first device's kernels of `work` only."""
    built.ops.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        built.ops.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        KernelEvent(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in kinds and event["args"].get("device", 0) == 0
    ]


def print_table(table: StepTable) -> None:
    """Print the table of one batch."""
    idle_share, timed_us = table.idle_us / table.step_us, table.timed_us
    print(
        f"\nbatch {table.batch}, context {table.mean_context:.0f}: {table.step_us:,.0f} us a step, {timed_us:,.0f} "
        f"without the profiler, {100 * idle_share:.2f} % idle, {table.host_ms:.2f} ms of the host"
    )
    in_use = "" if table.experts_in_use is None else f" with {table.experts_in_use:.1f} experts of a layer in use"
    print(f"{table.memory_share:.2f} of the memory's limit{in_use}")
    rows = [
        (
            row.op,
            shown(row.launches),
            shown(row.time_us),
            f"{100 * row.step_share:.1f} %",
            "-" if row.ceiling_share is None else f"{row.ceiling_share:.2f}",
        )
        for row in table.rows
    ]
    print_grid(("operation", "launches", "us", "of the step", "of ceiling"), rows)


if __name__ == "__main__":
    run_script(main)

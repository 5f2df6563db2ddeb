"""Time the sum of a group's parts, its residual add and norm, by each path and size, and NCCL's all-reduce.

    python -m tests.bench.sums --ranks 2

Prints microseconds a sum, and the limits for model/ops/gpu/group/paths.py. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cupy.cuda import nccl

from model.dtypes import NUMPY_DTYPES
from model.ops.gpu.group.open import open_devices
from model.ops.gpu.group.ops import CudaGroupOps
from model.ops.gpu.group.paths import PathLimits, SumPath, fits_push
from model.ops.group.arrays import GroupArray
from model.ops.group.turns import in_turn

SIZES = tuple(16 << n for n in range(23))
"""16 B to 64 MiB."""
WIDTH, EPS = 4096, 1e-6
IN_GRAPH, ROUNDS = 20, 5
BF16 = 9  # ncclBfloat16
ALL_REDUCE = "all-reduce"


def main() -> None:
    """Needs GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write JSON")
    flags = parser.parse_args()
    ops = open_devices(NUMPY_DTYPES["bfloat16"], None, range(flags.ranks), opens_nccl=True)
    print(ops.device_name)
    names = [path.value for path in SumPath] + [ALL_REDUCE]
    print(f"{'bytes':>10}" + "".join(f"{name:>12}" for name in names) + "   us, with residual and norm but all-reduce")
    table: dict[int, dict[str, float]] = {}
    for num_bytes in SIZES:
        table[num_bytes] = times = measured(ops, num_bytes)
        cells = (f"{times[name]:12.1f}" if name in times else " " * 12 for name in names)
        print(f"{num_bytes:>10}" + "".join(cells), flush=True)
    print(f"8 KiB and norm: {min(own for name, own in table[8192].items() if name != ALL_REDUCE):.1f} us")
    print(f"{flags.ranks}: {limits_of(table)}")
    if flags.out is not None:
        flags.out.write_text(json.dumps({"device": ops.device_name, "us": table}, indent=1))


def measured(ops: CudaGroupOps, num_bytes: int) -> dict[str, float]:
    """Microseconds by path."""
    width = min(WIDTH, num_bytes // 2)
    shape = (num_bytes // 2 // width, width)
    parts, residual, out = (filled(ops, shape) for _ in range(3))
    weight, times = filled(ops, (width,)), {}
    for path in SumPath:
        if path is SumPath.PUSH and not fits_push(shape[0], 2 * width):
            continue
        if path is SumPath.NCCL and not ops.sums.has_nccl:
            continue
        times[path.value] = seconds(ops, step_of(ops, path, parts, residual, weight, out), path is not SumPath.NCCL)
    if ops.sums.has_nccl:
        times[ALL_REDUCE] = seconds(ops, lambda: all_reduce(ops, parts, out), False)
    return {name: 1e6 * one for name, one in times.items()}


def filled(ops: CudaGroupOps, shape: tuple[int, ...]) -> GroupArray:
    array = ops.empty(shape, ops.dtype)
    for (_, rank), part in zip(in_turn(ops.ranks), array.parts, strict=True):
        part.data.memset_async(0, part.nbytes, rank.stream)
    return array


def step_of(ops: CudaGroupOps, path: SumPath, parts, residual, weight, out) -> Callable[[], None]:
    def work() -> None:
        with ops.scratch():
            if path in (SumPath.PUSH, SumPath.PULL):
                ops.sums.sum_add_rms_norm(path, parts.parts, residual.parts, weight.parts, EPS, out.parts)
            else:
                total = GroupArray(tuple(ops.sums.sum_by(path, parts.parts)))
                ops.add_rms_norm(total, residual, weight, EPS, out)

    return work


def all_reduce(ops: CudaGroupOps, parts: GroupArray, out: GroupArray) -> None:
    nccl.groupStart()
    for rank, link, part, into in zip(ops.ranks, ops.sums.mover.links, parts.parts, out.parts, strict=True):
        link.allReduce(part.data.ptr, into.data.ptr, part.size, BF16, nccl.NCCL_SUM, rank.stream.ptr)
    nccl.groupEnd()


def seconds(ops: CudaGroupOps, work: Callable[[], None], in_graph: bool) -> float:
    """The least time of one sum among IN_GRAPH in a row."""

    def many() -> None:
        for _ in range(IN_GRAPH):
            work()

    many()
    run, times = ops.capture(many) if in_graph else many, []
    for _ in range(ROUNDS):
        begin = ops.record_event()
        run()
        times.append(ops.elapsed_s(begin, ops.record_event()) / IN_GRAPH)
    ops.synchronize()
    return min(times)


def limits_of(table: dict[int, dict[str, float]]) -> PathLimits:
    """The largest size at which no later path is faster."""

    def most(path: SumPath, others: tuple[SumPath, ...]) -> int:
        sizes = [
            size
            for size, times in table.items()
            if path.value in times and all(times[path.value] <= times.get(other.value, np.inf) for other in others)
        ]
        return max(sizes, default=0)

    later = SumPath.PULL, SumPath.TWO_SHOT, SumPath.NCCL
    limits = [most(path, later[number:]) for number, path in enumerate((SumPath.PUSH, *later[:2]))]
    return PathLimits(limits[0], max(limits[:2]), max(limits))


if __name__ == "__main__":
    main()

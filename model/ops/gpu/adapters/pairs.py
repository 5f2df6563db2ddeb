"""Launches the kernel for adapters of experts and routers. Grids depend on shapes alone, so that launches can be
captured."""

from __future__ import annotations

import math

import numpy as np

from model.ops.adapter_interface import AdapterMatrix
from model.ops.gpu.experts.builds import MAX_EXPERTS
from model.ops.gpu.launcher import KernelLauncher, expect
from model.ops.interface import Array, ExpertGroups

MAX_SINGLE_PAIRS = 256
"""Most pairs for which a block takes one pair: those of a decode seldom share an adapter and an expert."""

TILE_PAIRS = 2
"""Pairs per block beyond MAX_SINGLE_PAIRS. H200, gate and up of Qwen3-30B-A3B at rank 16, one adapter: 256 rows take
54.6 us (70.9, 61.3 and 68.5 with 1, 4 and 8 pairs), 2,048 rows 351 us (492, 416 and 397)."""

MAX_SPLIT_PAIRS = 64
"""Most pairs for which blocks share a pair's columns, so that few pairs fill more of the device."""

_SPLIT_COLUMNS = 512
_THREADS = 256
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def add(
    device: KernelLauncher,
    x: Array,
    matrix: AdapterMatrix,
    slots: Array,
    out: Array,
    groups: ExpertGroups | None,
    is_sorted: bool,
) -> None:
    """Implement `AdapterOps.lora_add`."""
    num_pairs, num_adapters, width = len(out), len(matrix.a), matrix.part_ends[-1]
    if num_pairs == 0:
        return
    num_parts, max_rank, num_inputs = matrix.a.shape[1:]
    num_experts = 1 if groups is None else len(groups.offsets) - 1
    columns = width // num_parts
    expect("x", x, device.dtype, num_pairs if is_sorted else len(slots), num_inputs)
    expect("a", matrix.a, device.dtype, num_adapters, num_parts, max_rank, num_inputs)
    expect("b", matrix.b, device.dtype, num_adapters, width, max_rank)
    expect("ranks", matrix.ranks, _INT32, num_adapters)
    expect("slots", slots, _INT32, None)
    expect("out", out, _FLOAT32 if out.dtype == _FLOAT32 else device.dtype, num_pairs, width)
    if groups is None:
        expect("slots", slots, _INT32, num_pairs)
    else:
        expect("rows", groups.rows, _INT32, num_pairs)
    if num_inputs % 8 or max_rank % 8 or (x.data.ptr | matrix.a.data.ptr | matrix.b.data.ptr) % 16:
        raise ValueError(f"lora_add: {num_inputs} inputs and rank {max_rank} are not supported (multiples of 8)")
    if matrix.part_ends != tuple(range(columns, width + 1, columns)) or not 1 <= num_experts <= MAX_EXPERTS:
        problem = f"parts that end at {matrix.part_ends} and {num_experts} experts"
        raise ValueError(f"lora_add: {problem} are not supported (equal parts, 1..{MAX_EXPERTS} experts)")
    tile = 1 if num_pairs <= MAX_SINGLE_PAIRS else TILE_PAIRS
    block_columns = _SPLIT_COLUMNS if num_pairs <= MAX_SPLIT_PAIRS else columns
    rows, offsets = (None, None) if groups is None else (groups.rows, groups.offsets)
    sizes = map(
        np.int32, (num_pairs, num_experts, num_inputs, width, num_parts, max_rank, int(is_sorted), block_columns)
    )
    device.launch(
        "experts_lora",
        (math.ceil(num_pairs / tile), num_parts, math.ceil(columns / block_columns)),
        (out, x, matrix.a, matrix.b, matrix.ranks, rows, offsets, slots, *sizes),
        threads=_THREADS,
        shared_bytes=4 * tile * max_rank,
        overlaps=True,
        PAIRS=tile,
        OUT_FLOAT=int(out.dtype == _FLOAT32),
    )

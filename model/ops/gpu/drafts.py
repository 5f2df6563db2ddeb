"""Launches the kernels of an EAGLE-3 head."""

from __future__ import annotations

import math

import numpy as np

from model.ops.gpu.launcher import KernelLauncher, expect
from model.ops.gpu.norm import norm_threads
from model.ops.interface import Array, DraftPlan, DraftRuns

_THREADS = 256
_TOKENS_PER_BLOCK = 1024  # of spread_logits.cu
_RUN_INTS = 4
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)


def place_columns(device: KernelLauncher, x: Array, out: Array, first: int) -> None:
    """Implement `Ops.place_columns`."""
    (rows, width), out_width = x.shape, out.shape[1]
    expect("x", x, device.dtype, rows, width)
    expect("out", out, device.dtype, rows, out_width)
    if not 0 <= first <= out_width - width:
        raise ValueError(f"place_columns: {width} columns at {first} of {out_width} are not supported (within them)")
    args = (x, out, *map(np.int32, (width, out_width, first)))
    device.launch("place_columns", (rows,), args, overlaps=True)


def draft_input(
    device: KernelLauncher, token_ids: Array, table: Array, hidden: Array, weights: tuple[Array, Array], eps: float
) -> Array:
    """Implement `DraftOps.draft_input`."""
    rows, width = hidden.shape
    expect("token_ids", token_ids, _INT32, rows)
    expect("table", table, device.dtype, None, width)
    expect("hidden", hidden, device.dtype, rows, width)
    for name, weight in zip(("table_weight", "hidden_weight"), weights, strict=True):
        expect(name, weight, device.dtype, width)
    out = device.temporary((rows, 2 * width), device.dtype)
    args = (table, token_ids, hidden, *weights, out, np.int32(len(table)), np.int32(width), np.float32(eps))
    device.launch("draft_input", (rows, 2), args, threads=norm_threads(device, 2 * rows, width), overlaps=True)
    return out


def plan_drafts(
    device: KernelLauncher, sampled: Array, rows: tuple[Array, Array], runs: DraftRuns, out: DraftPlan
) -> None:
    """Implement `DraftOps.plan_drafts`."""
    (token_ids, positions), tables = rows, runs.block_tables
    num_steps, count = out.slots.shape
    expect("sampled", sampled, _INT32, None)
    expect("token_ids", token_ids, _INT32, None)
    expect("positions", positions, _INT32, len(token_ids))
    expect("runs", runs.rows, _INT32, count, _RUN_INTS)
    expect("tables", tables, _INT32, count, None)
    expect("last_rows", out.last_rows, _INT32, count)
    expect("num_accepted", out.num_accepted, _INT32, count)
    expect("places", out.places, _INT32, num_steps + 2, count)
    expect("slots", out.slots, _INT64, num_steps, count)
    arrays = (sampled, token_ids, positions, runs.rows, tables, out.last_rows, out.num_accepted, out.places, out.slots)
    sizes = map(np.int32, (count, num_steps, tables.shape[1], runs.block_size))
    device.launch("plan_drafts", (math.ceil(count / _THREADS),), (*arrays, *sizes))


def spread_logits(device: KernelLauncher, logits: Array, columns: Array) -> Array:
    """Implement `DraftOps.spread_logits`."""
    rows, num_columns = logits.shape
    expect("logits", logits, _FLOAT32, rows, num_columns)
    expect("columns", columns, _INT32, None)
    out = device.temporary((rows, len(columns)), _FLOAT32)
    args = (logits, columns, out, np.int32(num_columns), np.int32(len(columns)))
    grid = rows, math.ceil(len(columns) / _TOKENS_PER_BLOCK)
    device.launch("spread_logits", grid, args, overlaps=True, QUIRE_DTYPE=0)
    return out

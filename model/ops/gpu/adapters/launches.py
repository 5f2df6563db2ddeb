"""Launches the kernels of LoRA adapters. Grids depend on shapes alone, so that launches can be captured."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.gpu.launcher import KernelLauncher, expect
from model.ops.interface import Array

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

SMALL_TILE, LARGE_TILE = 16, 32
"""Rows per tile: few, so that decodes with many adapters fill the device; more, so that long prompts read adapters less
often."""

MOST_SMALL_ROWS = 1024
"""Most rows of a step with small tiles."""

_SHRINK_THREADS = 128
_SHRINK_STEP = 256
"""STEP of lora_shrink.cu: inputs that a block processes at a time."""

_SPLIT_INPUTS = 1024
"""Inputs per split, for small tiles; fixed, so that a row's sums do not depend on the step's other rows."""

_EXPAND_COLUMNS = 512
"""BLOCK_COLUMNS of lora_expand.cu."""

_MAX_PARTS = 3


def tile_rows(num_rows: int) -> int:
    """Implement `AdapterOps.lora_tile_rows`."""
    return SMALL_TILE if num_rows <= MOST_SMALL_ROWS else LARGE_TILE


def shrink(device: KernelLauncher, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> Array:
    """Implement `AdapterOps.lora_shrink`."""
    num_slots, num_parts, max_rank, num_inputs = matrix.a.shape
    _expect_adapters(matrix, adapters)
    expect("x", x, device.dtype, None, num_inputs)
    expect("a", matrix.a, device.dtype, num_slots, num_parts, max_rank, num_inputs)
    if num_inputs % 8 or max_rank % 8 or (x.data.ptr | matrix.a.data.ptr) % 16:
        raise ValueError(f"lora_shrink: {num_inputs} inputs and rank {max_rank} are not supported (multiples of 8)")
    row_tiles, num_rows, num_tiles = adapters.tile_rows // SMALL_TILE, len(adapters.rows), len(adapters.tiles)
    num_groups = math.ceil(num_parts * max_rank / (8 * row_tiles))
    whole = math.ceil(num_inputs / _SHRINK_STEP) * _SHRINK_STEP
    split_inputs = min(_SPLIT_INPUTS, whole) if row_tiles == 1 else whole
    num_splits = math.ceil(num_inputs / split_inputs)
    shrunk = device.temporary((num_splits, num_rows, num_parts, max_rank), _FLOAT32)
    sizes = map(np.int32, (num_rows, num_inputs, num_parts, max_rank, split_inputs))
    device.launch(
        "lora_shrink",
        (num_groups, num_tiles, num_splits),
        (shrunk, x, matrix.a, adapters.rows, adapters.tiles, matrix.ranks, *sizes),
        threads=_SHRINK_THREADS,
        overlaps=True,
        ROW_TILES=row_tiles,
    )
    return shrunk


def expand(device: KernelLauncher, shrunk: Array, matrix: AdapterMatrix, adapters: AdapterRows, out: Array) -> None:
    """Implement `AdapterOps.lora_expand`."""
    num_slots, width, max_rank = matrix.b.shape
    num_parts, num_rows = len(matrix.part_ends), len(adapters.rows)
    _expect_adapters(matrix, adapters)
    expect("shrunk", shrunk, _FLOAT32, None, num_rows, num_parts, max_rank)
    expect("b", matrix.b, device.dtype, num_slots, width, max_rank)
    expect("out", out, device.dtype, None, width)
    if any(end % 8 for end in matrix.part_ends) or (out.data.ptr | matrix.b.data.ptr | shrunk.data.ptr) % 16:
        raise ValueError(f"lora_expand: outputs that end at {matrix.part_ends} are not supported (multiples of 8)")
    num_blocks = sum(math.ceil((end - begin) / _EXPAND_COLUMNS) for begin, end in pairwise((0, *matrix.part_ends)))
    first_end, second_end = (*matrix.part_ends, width, width)[: _MAX_PARTS - 1]
    sizes = map(np.int32, (len(shrunk), num_rows, width, num_parts, max_rank, first_end, second_end))
    device.launch(
        "lora_expand",
        (num_blocks, len(adapters.tiles)),
        (out, shrunk, matrix.b, adapters.rows, adapters.tiles, matrix.ranks, *sizes),
        overlaps=True,
        ROW_TILES=adapters.tile_rows // SMALL_TILE,
    )


def _expect_adapters(matrix: AdapterMatrix, adapters: AdapterRows) -> None:
    expect("ranks", matrix.ranks, _INT32, len(matrix.a))
    expect("rows", adapters.rows, _INT32, None)
    expect("tiles", adapters.tiles, _INT32, None, 3)
    if adapters.tile_rows not in (SMALL_TILE, LARGE_TILE) or len(matrix.part_ends) > _MAX_PARTS:
        tiles = f"tiles of {adapters.tile_rows} rows and {len(matrix.part_ends)} parts"
        raise ValueError(f"lora: {tiles} are not supported ({SMALL_TILE} or {LARGE_TILE}, up to {_MAX_PARTS})")

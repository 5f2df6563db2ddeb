"""Reference of adapter products: a loop over tiles of rows, or over adapters.

Sums are in float64: rounded to float32, they hardly ever depend on the number of rows in a tile, unlike BLAS's float32
sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.interface import Array, ExpertGroups


def shrink(x: np.ndarray, matrix: AdapterMatrix, adapters: AdapterRows) -> np.ndarray:
    """x float32[T, K] -> float32[1, M, P, R]; see `AdapterOps.lora_shrink`."""
    _, num_parts, max_rank, num_inputs = matrix.a.shape
    shrunk = np.zeros((len(adapters.rows), num_parts, max_rank), np.float32)
    for slot, rank, tile in _tiles(matrix, adapters):
        a = matrix.a[slot, :, :rank].reshape(-1, num_inputs).astype(np.float64)
        shrunk[tile, :, :rank] = (x[adapters.rows[tile]].astype(np.float64) @ a.T).reshape(-1, num_parts, rank)
    return shrunk[None]


def expand(shrunk: np.ndarray, matrix: AdapterMatrix, adapters: AdapterRows, out: Array) -> None:
    """Add to out [T, N]; see `AdapterOps.lora_expand`."""
    summed = shrunk.sum(axis=0, dtype=np.float64)
    for slot, rank, tile in _tiles(matrix, adapters):
        rows = adapters.rows[tile]
        for part, (begin, end) in enumerate(pairwise((0, *matrix.part_ends))):
            b = matrix.b[slot, begin:end, :rank].astype(np.float64)
            out[rows, begin:end] = out[rows, begin:end].astype(np.float64) + summed[tile, part, :rank] @ b.T


def add(
    x: np.ndarray, matrix: AdapterMatrix, slots: Array, out: Array, groups: ExpertGroups | None, is_sorted: bool
) -> None:
    """x float32 [T, K] or [P, K]; see `AdapterOps.lora_add`."""
    rows, adapters = _adapters_of_pairs(slots, groups)
    for adapter in np.unique(adapters[adapters >= 0]).tolist():
        pairs = np.flatnonzero(adapters == adapter)
        rank, inputs = int(matrix.ranks[adapter]), x[pairs if is_sorted else rows[pairs]].astype(np.float64)
        for part, (begin, end) in enumerate(pairwise((0, *matrix.part_ends))):
            a, b = (side.astype(np.float64) for side in (matrix.a[adapter, part, :rank], matrix.b[adapter, begin:end]))
            out[pairs, begin:end] = out[pairs, begin:end].astype(np.float64) + inputs @ a.T @ b[:, :rank].T


def _adapters_of_pairs(slots: Array, groups: ExpertGroups | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the adapter (-1: none) of each sorted pair."""
    if groups is None:
        return np.arange(len(slots)), slots
    num_experts = len(groups.offsets) - 1
    rows = groups.rows[: groups.offsets[-1]]
    experts = np.repeat(np.arange(num_experts), np.diff(groups.offsets))
    return rows, np.where(slots[rows] < 0, -1, slots[rows] * num_experts + experts)


def _tiles(matrix: AdapterMatrix, adapters: AdapterRows) -> Iterator[tuple[int, int, slice]]:
    """Yield (slot, rank, rows of the tile) of adapters that change the product."""
    for slot, first, count in adapters.tiles.tolist():
        rank = int(matrix.ranks[slot])
        if rank:
            yield slot, rank, slice(first, first + count)

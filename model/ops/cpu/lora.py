"""Reference of the adapters' products: a loop over tiles of rows.

Sums are float64: rounded to float32, they hardly ever depend on how many rows a tile has, as BLAS's in float32 do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from model.ops.interface import AdapterMatrix, AdapterRows, Array


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


def _tiles(matrix: AdapterMatrix, adapters: AdapterRows) -> Iterator[tuple[int, int, slice]]:
    """Yield (slot, rank, rows of the tile) of adapters that change the product."""
    for slot, first, count in adapters.tiles.tolist():
        rank = int(matrix.ranks[slot])
        if rank:
            yield slot, rank, slice(first, first + count)

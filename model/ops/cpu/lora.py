"""Reference of the adapters' products: a loop over runs of rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from model.ops.interface import AdapterMatrix, AdapterRows, Array


def shrink(x: np.ndarray, matrix: AdapterMatrix, adapters: AdapterRows) -> np.ndarray:
    """x float32[T, K] -> float32[M, P, R]; see `AdapterOps.lora_shrink`."""
    _, num_parts, max_rank, num_inputs = matrix.a.shape
    shrunk = np.zeros((len(adapters.rows), num_parts, max_rank), np.float32)
    for slot, rank, run in _runs(matrix, adapters):
        a = matrix.a[slot, :, :rank].reshape(-1, num_inputs).astype(np.float32, copy=False)
        shrunk[run, :, :rank] = (x[adapters.rows[run]] @ a.T).reshape(-1, num_parts, rank)
    return shrunk


def expand(shrunk: np.ndarray, matrix: AdapterMatrix, adapters: AdapterRows, out: Array) -> None:
    """Add to out [T, N]; see `AdapterOps.lora_expand`."""
    for slot, rank, run in _runs(matrix, adapters):
        rows = adapters.rows[run]
        for part, (begin, end) in enumerate(pairwise((0, *matrix.part_ends))):
            b = matrix.b[slot, begin:end, :rank].astype(np.float32, copy=False)
            out[rows, begin:end] = out[rows, begin:end].astype(np.float32) + shrunk[run, part, :rank] @ b.T


def _runs(matrix: AdapterMatrix, adapters: AdapterRows) -> Iterator[tuple[int, int, slice]]:
    """Yield (slot, rank, run) of adapters that change the product."""
    for slot, first, count in adapters.runs.tolist():
        rank = int(matrix.ranks[slot])
        if rank:
            yield slot, rank, slice(first, first + count)

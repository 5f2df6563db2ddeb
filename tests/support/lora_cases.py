"""Adapters of random values for the kernels' tests: mixed ranks, one that changes nothing, rows in random order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from model.adapter_slots import adapter_rows
from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.cpu.ops import NumpyOps
from model.ops.weight import Weight
from tests.support.kernel_checks import NUMPY_DTYPES, normal

RANKS = (8, 0, 3, 64, 20)
PARTS = {"one": (512,), "two": (640, 1280), "three": (1032, 1160, 1288)}
NUM_PADDED_TILES = 2


@dataclass(frozen=True)
class LoraCase:
    x: np.ndarray
    matrix: AdapterMatrix
    rows: AdapterRows
    out: np.ndarray

    def on(self, ops, tile_rows: int) -> tuple[AdapterMatrix, AdapterRows]:
        """Return the adapters and the rows on a GPU, in tiles of `tile_rows`, padded as in a captured step."""
        matrix, slots = self.matrix, np.full(len(self.x), -1, np.int32)
        for slot, first, count in self.rows.tiles:
            slots[self.rows.rows[first : first + count]] = slot
        tiled = adapter_rows(slots, NumpyOps(), tile_rows)
        rows = np.append(tiled.rows, np.zeros(len(self.x) - len(tiled.rows), np.int32))
        tiles = np.concatenate([tiled.tiles, np.zeros((NUM_PADDED_TILES, 3), np.int32)])
        arrays = {name: ops.upload(getattr(matrix, name)) for name in ("a", "b", "ranks")}
        return replace(matrix, **arrays), AdapterRows(ops.upload(rows), ops.upload(tiles), tile_rows)

    def known(self, shrunk: np.ndarray) -> np.ndarray:
        """Return float32[C, M, P, R] summed over C, with zeros where it is undefined."""
        known = np.zeros((len(self.rows.rows), *shrunk.shape[2:]), np.float32)
        for slot, first, count in self.rows.tiles:
            rank = self.matrix.ranks[slot]
            known[first : first + count, :, :rank] = shrunk[:, first : first + count, :, :rank].sum(axis=0)
        return known


def lora_case(rng: np.random.Generator, dtype: str, parts: str, num_rows: int, num_inputs: int = 264) -> LoraCase:
    """A's rows beyond a rank are NaN, up to the next multiple of 8 too: what comes of them must not count."""
    ends, max_rank = PARTS[parts], 64
    slots = rng.integers(-1, len(RANKS), num_rows).astype(np.int32)
    a = normal(rng, (len(RANKS), len(ends), max_rank, num_inputs), dtype, num_inputs**-0.5)
    b = normal(rng, (len(RANKS), ends[-1], max_rank), dtype)
    for slot, rank in enumerate(RANKS):
        a[slot, :, rank:] = np.nan
        b[slot, :, rank:] = 0
    return LoraCase(
        normal(rng, (num_rows, num_inputs), dtype),
        AdapterMatrix(a, b, np.array(RANKS, np.int32), ends),
        adapter_rows(slots, NumpyOps()),
        normal(rng, (num_rows, ends[-1]), dtype),
    )


def adapted_product(ops, case: LoraCase, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return what the GPU gives for x @ weight.T + bias and the rows' adapters, in one call."""
    with ops.scratch():
        bias = None if bias is None else ops.upload(bias)
        out = ops.lora_linear(ops.upload(case.x), Weight(ops.upload(weight)), bias, *case.on(ops, 16))
        assert out is not None
        return ops.download(out)


def expected_product(case: LoraCase, weight: np.ndarray, bias: np.ndarray | None, dtype: str) -> np.ndarray:
    """Return the same of NumPy: `linear`, then `lora_expand`, rounded once."""
    reference = NumpyOps(NUMPY_DTYPES[dtype])
    out = reference.linear(case.x, Weight(weight), bias, dtype=np.dtype(np.float32))
    reference.lora_expand(reference.lora_shrink(case.x, case.matrix, case.rows), case.matrix, case.rows, out)
    return out.astype(NUMPY_DTYPES[dtype])

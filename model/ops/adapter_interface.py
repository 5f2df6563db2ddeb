"""Contract of LoRA operations. Dimensions are those of `interface`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from model.ops.interface import ExpertGroups, Fp8Rows
from model.ops.weight import Array, Weight


@dataclass(frozen=True)
class AdapterRows:
    """The M rows of a step that have an adapter, ordered by slot, in G tiles of one adapter each."""

    rows: Array  # int32[M], of the step's T
    tiles: Array  # int32[G, 3]: slot, first of `rows`, number of rows (0: padding)
    tile_rows: int  # most rows of a tile


@dataclass(frozen=True)
class AdapterMatrix:
    """Adapters of one product x [T, K] -> [T, N], by slot. The outputs are P parts with one A each."""

    a: Array  # [S, P, R, K] in `Ops.dtype`; undefined beyond an adapter's rank
    b: Array  # [S, N, R] in `Ops.dtype`, multiplied by the adapter's scale; zeros beyond its rank
    ranks: Array  # int32[S], at most R; 0: the adapter does not change this product
    part_ends: tuple[int, ...]  # P, rows of `b` where parts end; the last is N


class AsyncWrite(Protocol):
    """A copy to the device that runs during other work."""

    def is_done(self) -> bool:
        """Return whether the copy is done. Raise its error."""

    def wait(self) -> None:
        """Wait for the copy. Raise its error."""


@runtime_checkable
class AdapterOps(Protocol):
    """LoRA products of a backend that supports them (`backend.adapter_ops`)."""

    def lora_tile_rows(self, num_rows: int) -> int:
        """Return `AdapterRows.tile_rows` for `num_rows` rows."""

    def lora_linear(
        self, x: Array | Fp8Rows, weight: Weight, bias: Array | None, matrix: AdapterMatrix, adapters: AdapterRows
    ) -> Array | None:
        """Return linear(x [T, K], weight, bias) plus the adapters' products [T, N], rounded once; None if no kernel
        computes both."""

    def lora_shrink(self, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> Array:
        """Return float32[C, M, P, R] for x [T, K]; its sum over C is x[rows] @ a[slot, p].T. The backend chooses C.
        Values beyond an adapter's rank are undefined."""

    def lora_expand(self, shrunk: Array, matrix: AdapterMatrix, adapters: AdapterRows, out: Array) -> None:
        """Add shrunk[:, m, p].sum(0) @ b[slot, rows of part p].T to row rows[m] of out [T, N]; summed in float32,
        rounded once."""

    def lora_add(
        self,
        x: Array,
        matrix: AdapterMatrix,
        slots: Array,
        out: Array,
        groups: ExpertGroups | None = None,
        *,
        is_sorted: bool = False,
    ) -> None:
        """Add b[i] @ a[i] @ x to out [P, N] for each sorted pair of a row and an expert, i = slots[row] * E + expert;
        summed in float32, rounded once.

        slots int32[T], -1: none. x is [T, K], or [P, K] of sorted pairs if `is_sorted`; out is in `Ops.dtype` or
        float32. If `groups` is None, each row is a pair with the only expert.
        """

    def write_async(self, values: Iterable[tuple[Array, Array]], *, is_unused: bool = False) -> AsyncWrite:
        """Start to copy host values to contiguous arrays of their shapes and dtypes, after all work submitted so far.

        `is_unused`: no work uses the arrays, so the copies need not wait. `values` may be read on another thread. The
        arrays must not be used until the write is done.
        """

    def write_slot_async(
        self,
        values_of: Callable[[int], Iterable[tuple[Array, Array]]],
        slot: int,
        last_slot: int,
        memory: tuple[str, np.ndarray],
        *,
        is_unused: bool = False,
    ) -> AsyncWrite:
        """Like `write_async` of a slot's values, whose arrays are linear in the slot.

        `memory` is (key, uint8[n]). With equal keys, host values are the same parts of the memory, or are equal.
        """

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        """Lock the pages of uint8[n], so that `write_async` copies from them directly; return a function that unlocks
        them.

        Callable from any thread, which it blocks for some 0.1 s while others may launch kernels.
        """

"""Adapter products of a group. For a weight divided by rows, a rank has A and its rows of B. For one divided by
columns, it has its columns of A, and B, and adds their product to its partial sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from model.ops.adapter_interface import AdapterMatrix, AdapterOps, AdapterRows, AsyncWrite
from model.ops.group.arrays import GroupArray, joined, on_rank
from model.ops.group.turns import in_turn
from model.ops.interface import Array, ExpertGroups, Fp8Rows, PartOps
from model.ops.weight import Weight


class GroupAdapterOps:
    """`AdapterOps` on n ranks."""

    def __init__(self, devices: Sequence[PartOps], ranks: Sequence[AdapterOps]):
        self._devices = tuple(devices)
        self._ranks = tuple(ranks)

    def lora_tile_rows(self, num_rows: int) -> int:
        return self._ranks[0].lora_tile_rows(num_rows)

    def write_async(self, values: Iterable[tuple[Array, Array]], *, is_unused: bool = False) -> AsyncWrite:
        pairs = list(values)
        return _Writes([ops.write_async(on_rank(pairs, rank), is_unused=is_unused) for rank, ops in self._turns()])

    def write_slot_async(
        self,
        values_of: Callable[[int], Iterable[tuple[Array, Array]]],
        slot: int,
        last_slot: int,
        memory: tuple[str, np.ndarray],
        *,
        is_unused: bool = False,
    ) -> AsyncWrite:
        return self.write_async(values_of(slot), is_unused=is_unused)

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        return self._ranks[0].pin(memory)  # for every device

    def lora_linear(
        self, x: Array | Fp8Rows, weight: Weight, bias: Array | None, matrix: AdapterMatrix, adapters: AdapterRows
    ) -> Array | None:
        return None

    def lora_shrink(self, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> Array:
        arrays = x, matrix, adapters
        return joined([ops.lora_shrink(*on_rank(arrays, rank)) for rank, ops in self._turns()])

    def lora_expand(self, shrunk: Array, matrix: AdapterMatrix, adapters: AdapterRows, out: Array) -> None:
        """Add to each rank's outputs, or to its part of `PartialSums`."""
        arrays = shrunk, matrix, adapters, GroupArray(out.parts)
        for rank, ops in self._turns():
            ops.lora_expand(*on_rank(arrays, rank))

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
        """Add to each rank's outputs, or to its part of `PartialSums`."""
        arrays = x, matrix, slots, GroupArray(out.parts), groups
        for rank, ops in self._turns():
            ops.lora_add(*on_rank(arrays, rank), is_sorted=is_sorted)

    def _turns(self) -> Iterator[tuple[int, AdapterOps]]:
        return ((rank, self._ranks[rank]) for rank, _ in in_turn(self._devices))


class _Writes:
    def __init__(self, writes: Sequence[AsyncWrite]):
        self._writes = writes

    def is_done(self) -> bool:
        return all(write.is_done() for write in self._writes)

    def wait(self) -> None:
        for write in self._writes:
            write.wait()

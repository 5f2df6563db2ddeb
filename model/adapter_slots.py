"""Slots of LoRA adapters on the device, and the part of a step's batch that uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.ops.group.arrays import GroupArray, Split
from model.ops.interface import AdapterMatrix, AdapterOps, AdapterRows, Array, AsyncWrite, Fp8Rows, Ops
from model.ops.weight import Weight
from model.weights.lora.adapter import LoraAdapter, Part, ProductPart, product_parts
from model.weights.sharding import Sharding

NO_SLOT = -1
"""Slot of a row without an adapter, in `ForwardInputs.adapter_slots`."""


class AdapterSlots:
    def __init__(self, config: ModelConfig, ops: Ops, adapter_ops: AdapterOps, num_slots: int, max_rank: int):
        """Allocate `num_slots` adapters of rank `max_rank` for every product, on each rank its part."""
        self.ops = ops
        self.adapter_ops = adapter_ops
        self.num_slots = num_slots
        sharding = Sharding(config, ops.num_ranks)
        self._parts = tuple(product_parts(config, layer, sharding) for layer in range(config.num_layers))
        self._layers = tuple(
            {product: self._matrix(parts, num_slots, max_rank) for product, parts in layer.items()}
            for layer in self._parts
        )
        adapter_ops.write_async(()).wait()  # allocate its buffers now

    def matrix(self, layer: int, product: str) -> AdapterMatrix:
        return self._layers[layer][product]

    def write(self, slot: int, adapter: LoraAdapter) -> AsyncWrite:
        """Start to replace the slot's adapter; its rank is at most `max_rank`.

        Work submitted so far may use the old one. No later work may use the slot until the write is done.
        """
        return self.adapter_ops.write_async(self._values(slot, adapter))

    def _values(self, slot: int, adapter: LoraAdapter) -> Iterator[tuple[Array, Array]]:
        """Yield arrays and what they become: ranks, then matrices in the order of `read_adapter`'s memory."""
        matrices = [
            (self._layers[layer][product], parts, adapter.products.get((layer, product), {}))
            for layer, parts_of in enumerate(self._parts)
            for product, parts in parts_of.items()
        ]
        for matrix, _, values in matrices:
            yield matrix.ranks[slot : slot + 1], np.array([_rank_of(values)], np.int32)
        for matrix, parts, values in matrices:
            yield from self._matrix_values(matrix, parts, slot, values)

    def _matrix(self, parts: Sequence[ProductPart], num_slots: int, max_rank: int) -> AdapterMatrix:
        ends = np.cumsum([part.num_outputs for part in parts]).tolist()
        return AdapterMatrix(
            a=self.ops.empty((num_slots, len(parts), max_rank, parts[0].num_inputs), self.ops.dtype),
            b=self.ops.empty((num_slots, ends[-1], max_rank), self.ops.dtype),
            ranks=self.ops.upload(np.zeros(num_slots, np.int32)),
            part_ends=tuple(ends),
        )

    def _matrix_values(
        self, matrix: AdapterMatrix, parts: Sequence[ProductPart], slot: int, values: Mapping[int, Part]
    ) -> Iterator[tuple[Array, Array]]:
        rank = _rank_of(values)
        if not rank:
            return
        first, max_rank = 0, matrix.b.shape[2]
        for number, (part, end) in enumerate(zip(parts, matrix.part_ends, strict=True)):
            to_a, to_b = matrix.a[slot, number, :rank], matrix.b[slot, first:end]
            if number in values:
                (a, b), split = values[number], part.split
                by_inputs = split is not None and split.axis == 1
                yield to_a, self._parts_of(_padded(a, (rank, a.shape[1])), split if by_inputs else None)
                yield to_b, self._parts_of(_padded(b, (len(b), max_rank)), None if by_inputs else split)
            else:
                yield to_a, np.zeros(to_a.shape, to_a.dtype)
                yield to_b, np.zeros(to_b.shape, to_b.dtype)
            first = end

    def _parts_of(self, whole: np.ndarray, split: Split | None) -> Array:
        """Return each rank's part on the host; None: whole on each."""
        num_ranks = self.ops.num_ranks
        if split is None or num_ranks == 1:
            return whole
        return GroupArray(tuple(split.part_of(whole, rank, num_ranks) for rank in range(num_ranks)))


def slot_bytes(config: ModelConfig, dtype: np.dtype, max_rank: int, num_ranks: int = 1) -> int:
    """Return a rank's bytes of one slot."""
    sharding = Sharding(config, num_ranks)
    layers = [product_parts(config, layer, sharding) for layer in range(config.num_layers)]
    parts = [part for layer in layers for parts in layer.values() for part in parts]
    return max_rank * sum(part.num_outputs + part.num_inputs for part in parts) * dtype.itemsize


@dataclass(frozen=True)
class BatchAdapters:
    """Adapters of a step that has some."""

    slots: AdapterSlots
    rows: AdapterRows

    def linear(self, layer: int, product: str, x: Array | Fp8Rows, weight: Weight, bias: Array | None) -> Array:
        """Return x [T, K] @ weight.T plus bias and the adapters' products -> [T, N]."""
        ops, matrix = self.slots.adapter_ops, self.slots.matrix(layer, product)
        out = ops.lora_linear(x, weight, bias, matrix, self.rows)
        if out is None:
            out = self.slots.ops.linear(x, weight, bias)
            inputs = self.slots.ops.dequantise_rows(x) if isinstance(x, Fp8Rows) else x
            ops.lora_expand(ops.lora_shrink(inputs, matrix, self.rows), matrix, self.rows, out)
        return out


class StaticAdapterRows:
    """Arrays of `AdapterRows` at fixed addresses, for captured steps of at most `max_rows` rows."""

    def __init__(self, slots: AdapterSlots, max_rows: int):
        self._slots = slots
        smallest_tile = slots.adapter_ops.lora_tile_rows(1)
        num_tiles = max_rows // smallest_tile + min(max_rows, slots.num_slots)
        self.padding = [np.zeros(max_rows, np.int32), np.zeros((num_tiles, 3), np.int32)]
        self._arrays: list[Array] = []

    def place(self, arrays: list[Array]) -> None:
        """Use these device arrays, of the shapes of `padding`."""
        self._arrays = arrays

    def batch(self, num_rows: int) -> BatchAdapters:
        """Return the adapters of a captured step of `num_rows` rows."""
        (rows, tiles), tile_rows = self._arrays, self._slots.adapter_ops.lora_tile_rows(num_rows)
        num_tiles = num_rows // tile_rows + min(num_rows, self._slots.num_slots)
        return BatchAdapters(self._slots, AdapterRows(rows[:num_rows], tiles[:num_tiles], tile_rows))

    def host_rows(self, slots: np.ndarray, num_rows: int) -> list[np.ndarray]:
        """Return padded arrays of the rows' int32[T] slots for a captured step of `num_rows` rows."""
        padded = [np.zeros_like(array) for array in self.padding]
        tile_rows = self._slots.adapter_ops.lora_tile_rows(num_rows)
        for array, known in zip(padded, group_rows(slots, tile_rows), strict=True):
            array[: len(known)] = known
        return padded


def group_rows(slots: np.ndarray, tile_rows: int) -> list[np.ndarray]:
    """Group int32[T] slots of rows (NO_SLOT: none) by slot: the `rows` and `tiles` of `AdapterRows`."""
    rows = np.flatnonzero(slots != NO_SLOT).astype(np.int32)
    rows = rows[np.argsort(slots[rows], kind="stable")]
    used, firsts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
    num_tiles = -(-counts // tile_rows)
    of_run = np.repeat(np.arange(len(used)), num_tiles)
    begins = tile_rows * (np.arange(len(of_run)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles))
    sizes = np.minimum(counts[of_run] - begins, tile_rows)
    return [rows, np.stack([used[of_run], firsts[of_run] + begins, sizes], axis=1).astype(np.int32)]


def adapter_rows(slots: np.ndarray, ops: Ops, tile_rows: int | None = None) -> AdapterRows:
    """Group int32[T] slots of rows on the device, in tiles of at most `tile_rows` (default: any number)."""
    most = tile_rows or max(1, len(slots))
    rows, tiles = ops.upload_all(group_rows(slots, most))
    return AdapterRows(rows, tiles, most)


def _rank_of(values: Mapping[int, Part]) -> int:
    return max((len(a) for a, _ in values.values()), default=0)


def _padded(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    if array.shape == shape:
        return np.ascontiguousarray(array)
    padded = np.zeros(shape, array.dtype)
    padded[: array.shape[0], : array.shape[1]] = array
    return padded

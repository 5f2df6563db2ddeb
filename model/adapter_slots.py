"""Device slots of LoRA adapters, and the part of a step's batch that uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from model.config import ModelConfig
from model.ops.adapter_interface import AdapterMatrix, AdapterOps, AdapterRows, AsyncWrite
from model.ops.group.arrays import GroupArray, Split
from model.ops.interface import Array, ExpertGroups, Fp8Rows, Ops
from model.ops.weight import Weight
from model.weights.lora.adapter import LoraAdapter
from model.weights.lora.products import DOWN, GATE_UP, ROUTER, STACK_NAMES, Part, ProductPart, product_parts
from model.weights.sharding import Sharding

NO_SLOT = -1
"""Slot of a row without an adapter, in `ForwardInputs.adapter_slots`."""


class AdapterSlots:
    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        adapter_ops: AdapterOps,
        num_slots: int,
        max_rank: int,
        *,
        with_experts: bool = False,
    ):
        """Allocate `num_slots` adapters of rank `max_rank` for every product, each rank its part. `with_experts`: for
        routers and experts too."""
        self.ops = ops
        self.adapter_ops = adapter_ops
        self.num_slots = num_slots
        self._max_rank = max_rank
        self.has_experts = with_experts and config.experts is not None
        self._num_experts = 1 if config.experts is None else config.experts.num_experts
        sharding = Sharding(config, ops.num_ranks)
        self._parts = tuple(product_parts(config, layer, sharding, with_experts) for layer in range(config.num_layers))
        self._layers = tuple(
            {
                product: self._matrix(parts, num_slots * self._num_matrices(product), max_rank)
                for product, parts in layer.items()
            }
            for layer in self._parts
        )
        self._first = {product: matrix for layer in reversed(self._layers) for product, matrix in layer.items()}
        adapter_ops.write_async(()).wait()  # allocate its buffers now

    def matrix(self, layer: int, product: str) -> AdapterMatrix:
        """Return a product's adapters. If this layer, in a warm-up run, lacks the product, return those of the first
        that has it."""
        return self._layers[layer].get(product) or self._first[product]

    def host_rows(self, slots: np.ndarray, tile_rows: int) -> list[np.ndarray]:
        """Return the arrays for `batch`, given slots int32[T] of rows."""
        return [*group_rows(slots, tile_rows), *([slots] if self.has_experts else [])]

    def batch(self, arrays: Sequence[Array], tile_rows: int) -> BatchAdapters:
        rows, tiles, *slots = arrays
        return BatchAdapters(self, AdapterRows(rows, tiles, tile_rows), slots[0] if slots else None)

    def write(self, slot: int, adapter: LoraAdapter, *, is_unused: bool = False) -> AsyncWrite:
        """Start to replace the slot's adapter; its rank is at most `max_rank`.

        Work submitted so far may use the old adapter, unless `is_unused`. Later work must not use the slot until the
        write is done.
        """
        values_of = partial(self._values, adapter=adapter)
        if adapter.layout is None or adapter.memory is None or not self._is_whole(adapter):
            return self.adapter_ops.write_async(values_of(slot), is_unused=is_unused)
        memory, last = (adapter.layout, adapter.memory), self.num_slots - 1
        return self.adapter_ops.write_slot_async(values_of, slot, last, memory, is_unused=is_unused)

    def _is_whole(self, adapter: LoraAdapter) -> bool:
        """Return whether all values of the adapter are copied as they lie in its memory."""
        if self.ops.num_ranks > 1 or self.has_experts:
            return False
        return all(len(a) == self._max_rank for parts in adapter.products.values() for a, _ in parts.values())

    def _values(self, slot: int, adapter: LoraAdapter) -> Iterator[tuple[Array, Array]]:
        """Yield arrays and their new values: ranks, then matrices in the order of `read_adapter`'s memory."""
        matrices = [
            (product, self._layers[layer][product], parts, adapter.products.get((layer, product), {}))
            for layer, parts_of in enumerate(self._parts)
            for product, parts in parts_of.items()
        ]
        for product, matrix, _, values in matrices:
            count = self._num_matrices(product)
            own = slice(slot * count, (slot + 1) * count)
            yield matrix.ranks[own], np.full(count, _rank_of(values), np.int32)
        for product, matrix, parts, values in matrices:
            write = self._stack_values if product in STACK_NAMES else self._matrix_values
            yield from write(matrix, parts, slot, values)

    def _num_matrices(self, product: str) -> int:
        return self._num_experts if product in STACK_NAMES else 1

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

    def _stack_values(
        self, matrix: AdapterMatrix, parts: Sequence[ProductPart], slot: int, values: Mapping[int, Part]
    ) -> Iterator[tuple[Array, Array]]:
        """Yield the experts' arrays and their new values, each as a whole."""
        own = slice(slot * self._num_experts, (slot + 1) * self._num_experts)
        if _rank_of(values):
            sides = [self._rank_stacks(matrix, parts, values, number) for number in range(self.ops.num_ranks)]
            for target, own_values in zip((matrix.a[own], matrix.b[own]), zip(*sides, strict=True), strict=True):
                yield target, own_values[0] if self.ops.num_ranks == 1 else GroupArray(own_values)

    def _rank_stacks(
        self, matrix: AdapterMatrix, parts: Sequence[ProductPart], values: Mapping[int, Part], rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's a [E, P, R, K] and b [E, N, R]."""
        a = np.zeros((self._num_experts, *matrix.a.shape[1:]), matrix.a.dtype)
        b = np.zeros((self._num_experts, *matrix.b.shape[1:]), matrix.b.dtype)
        for number, (part_a, part_b) in values.items():
            split, end = parts[number].split, matrix.part_ends[number]
            if split is not None and self.ops.num_ranks > 1:
                of_experts, num_ranks = replace(split, axis=split.axis + 1), self.ops.num_ranks
                if split.axis == 1:
                    part_a = of_experts.part_of(part_a, rank, num_ranks)
                else:
                    part_b = of_experts.part_of(part_b, rank, num_ranks)
            a[:, number, : part_a.shape[1]] = part_a
            b[:, end - parts[number].num_outputs : end, : part_b.shape[2]] = part_b
        return a, b

    def _parts_of(self, whole: np.ndarray, split: Split | None) -> Array:
        """Return each rank's part on the host, or without a split the whole."""
        num_ranks = self.ops.num_ranks
        if split is None or num_ranks == 1:
            return whole
        return GroupArray(tuple(split.part_of(whole, rank, num_ranks) for rank in range(num_ranks)))


def slot_bytes(
    config: ModelConfig, dtype: np.dtype, max_rank: int, num_ranks: int = 1, *, with_experts: bool = False
) -> int:
    """Return a rank's bytes per slot."""
    sharding = Sharding(config, num_ranks)
    num_experts = 1 if config.experts is None else config.experts.num_experts
    width = 0
    for layer in range(config.num_layers):
        for product, parts in product_parts(config, layer, sharding, with_experts).items():
            own = sum(part.num_outputs + part.num_inputs for part in parts)
            width += own * (num_experts if product in STACK_NAMES else 1)
    return max_rank * width * dtype.itemsize


@dataclass(frozen=True)
class BatchAdapters:
    """Adapters of a step that uses some."""

    slots: AdapterSlots
    rows: AdapterRows
    row_slots: Array | None = None  # int32[T], NO_SLOT: none; None: no slot has experts

    def linear(self, layer: int, product: str, x: Array | Fp8Rows, weight: Weight, bias: Array | None) -> Array:
        """Return x [T, K] @ weight.T plus bias and the adapters' products -> [T, N]."""
        ops, matrix = self.slots.adapter_ops, self.slots.matrix(layer, product)
        out = ops.lora_linear(x, weight, bias, matrix, self.rows)
        if out is None:
            out = self.slots.ops.linear(x, weight, bias)
            inputs = self.slots.ops.dequantise_rows(x) if isinstance(x, Fp8Rows) else x
            ops.lora_expand(ops.lora_shrink(inputs, matrix, self.rows), matrix, self.rows, out)
        return out

    def of_experts(self, layer: int) -> LayerExpertAdapters | None:
        """Return the adapters of a layer of experts, or None if the slots have none."""
        return None if self.row_slots is None else LayerExpertAdapters(self.slots, self.row_slots, layer)


@dataclass(frozen=True)
class LayerExpertAdapters:
    """`ExpertAdapters` of one layer."""

    slots: AdapterSlots
    row_slots: Array
    layer: int

    def add_to_logits(self, x: Array, logits: Array) -> None:
        self._add(ROUTER, x, logits)

    def add_to_gate_up(self, x: Array, product: Array, groups: ExpertGroups) -> None:
        self._add(GATE_UP, x, product, groups)

    def add_to_down(self, gated: Array | Fp8Rows, product: Array, groups: ExpertGroups) -> None:
        x = self.slots.ops.dequantise_rows(gated) if isinstance(gated, Fp8Rows) else gated
        self._add(DOWN, x, product, groups, is_sorted=True)

    def _add(
        self, name: str, x: Array, out: Array, groups: ExpertGroups | None = None, *, is_sorted: bool = False
    ) -> None:
        matrix = self.slots.matrix(self.layer, name)
        self.slots.adapter_ops.lora_add(x, matrix, self.row_slots, out, groups, is_sorted=is_sorted)


class StaticAdapterRows:
    """Arrays of `AdapterRows` at fixed addresses, for captured steps of at most `max_rows` rows."""

    def __init__(self, slots: AdapterSlots, max_rows: int):
        self._slots = slots
        smallest_tile = slots.adapter_ops.lora_tile_rows(1)
        num_tiles = max_rows // smallest_tile + min(max_rows, slots.num_slots)
        self.padding = [np.zeros(max_rows, np.int32), np.zeros((num_tiles, 3), np.int32)]
        if slots.has_experts:
            self.padding.append(np.full(max_rows, NO_SLOT, np.int32))
        self._arrays: list[Array] = []

    def place(self, arrays: list[Array]) -> None:
        """Use these device arrays, which have the shapes of `padding`."""
        self._arrays = arrays

    def batch(self, num_rows: int) -> BatchAdapters:
        """Return the adapters of a captured step of `num_rows` rows."""
        (rows, tiles, *slots), tile_rows = self._arrays, self._slots.adapter_ops.lora_tile_rows(num_rows)
        num_tiles = num_rows // tile_rows + min(num_rows, self._slots.num_slots)
        own = [rows[:num_rows], tiles[:num_tiles], *(array[:num_rows] for array in slots)]
        return self._slots.batch(own, tile_rows)

    def host_rows(self, slots: np.ndarray, num_rows: int) -> list[np.ndarray]:
        """Return padded arrays for a captured step of `num_rows` rows with slots int32[T]."""
        padded = [array.copy() for array in self.padding]
        tile_rows = self._slots.adapter_ops.lora_tile_rows(num_rows)
        for array, known in zip(padded, self._slots.host_rows(slots, tile_rows), strict=True):
            array[: len(known)] = known
        return padded


def group_rows(slots: np.ndarray, tile_rows: int) -> list[np.ndarray]:
    """Group slots int32[T] of rows (NO_SLOT: none) into `rows` and `tiles` of `AdapterRows`."""
    rows = np.flatnonzero(slots != NO_SLOT).astype(np.int32)
    rows = rows[np.argsort(slots[rows], kind="stable")]
    used, firsts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
    num_tiles = -(-counts // tile_rows)
    of_run = np.repeat(np.arange(len(used)), num_tiles)
    begins = tile_rows * (np.arange(len(of_run)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles))
    sizes = np.minimum(counts[of_run] - begins, tile_rows)
    return [rows, np.stack([used[of_run], firsts[of_run] + begins, sizes], axis=1).astype(np.int32)]


def adapter_rows(slots: np.ndarray, ops: Ops, tile_rows: int | None = None) -> AdapterRows:
    """Group slots int32[T] of rows on the device, in tiles of at most `tile_rows` (default: any number)."""
    most = tile_rows or max(1, len(slots))
    rows, tiles = ops.upload_all(group_rows(slots, most))
    return AdapterRows(rows, tiles, most)


def _rank_of(values: Mapping[int, Part]) -> int:
    return max((a.shape[-2] for a, _ in values.values()), default=0)


def _padded(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    if array.shape == shape:
        return np.ascontiguousarray(array)
    padded = np.zeros(shape, array.dtype)
    padded[: array.shape[0], : array.shape[1]] = array
    return padded

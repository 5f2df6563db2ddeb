"""Slots of LoRA adapters on the device, and the part of a step's batch that uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.ops.group.device import upload_parts
from model.ops.interface import AdapterMatrix, AdapterOps, AdapterRows, Array, Fp8Rows, Ops
from model.weights.lora.adapter import LoraAdapter, Part, ProductPart, product_parts
from model.weights.sharding import Sharding

NO_SLOT = -1
"""Slot of a row without an adapter, in `ForwardInputs.adapter_slots`."""


class AdapterSlots:
    def __init__(self, config: ModelConfig, ops: Ops, adapter_ops: AdapterOps, num_slots: int, max_rank: int):
        """Allocate `num_slots` adapters of rank `max_rank` for every product of every layer, on each rank its part."""
        self.ops = ops
        self.adapter_ops = adapter_ops
        self.num_slots = num_slots
        sharding = Sharding(config, ops.num_ranks)
        self._parts = tuple(product_parts(config, layer, sharding) for layer in range(config.num_layers))
        self._layers = tuple(
            {product: self._matrix(parts, num_slots, max_rank) for product, parts in layer.items()}
            for layer in self._parts
        )

    def matrix(self, layer: int, product: str) -> AdapterMatrix:
        return self._layers[layer][product]

    def write(self, slot: int, adapter: LoraAdapter) -> None:
        """Replace the slot's adapter; its rank is at most `max_rank`."""
        for layer, parts_of in enumerate(self._parts):
            for product, parts in parts_of.items():
                values = adapter.products.get((layer, product), {})
                self._write_matrix(self._layers[layer][product], parts, slot, values)

    def _matrix(self, parts: Sequence[ProductPart], num_slots: int, max_rank: int) -> AdapterMatrix:
        ends = np.cumsum([part.num_outputs for part in parts]).tolist()
        return AdapterMatrix(
            a=self.ops.empty((num_slots, len(parts), max_rank, parts[0].num_inputs), self.ops.dtype),
            b=self.ops.empty((num_slots, ends[-1], max_rank), self.ops.dtype),
            ranks=self.ops.upload(np.zeros(num_slots, np.int32)),
            part_ends=tuple(ends),
        )

    def _write_matrix(
        self, matrix: AdapterMatrix, parts: Sequence[ProductPart], slot: int, values: Mapping[int, Part]
    ) -> None:
        rank = max((len(a) for a, _ in values.values()), default=0)
        matrix.ranks[slot] = rank
        if not rank:
            return
        first = 0
        for number, (part, end) in enumerate(zip(parts, matrix.part_ends, strict=True)):
            matrix.a[slot, number], matrix.b[slot, first:end] = 0, 0
            if number in values:
                (a, b), split = values[number], part.split
                by_inputs = split is not None and split.axis == 1
                matrix.a[slot, number, : len(a)] = upload_parts(self.ops, a, split if by_inputs else None)
                matrix.b[slot, first:end, : len(a)] = upload_parts(self.ops, b, None if by_inputs else split)
            first = end


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

    def add(self, layer: int, product: str, x: Array | Fp8Rows, out: Array) -> None:
        """Add the adapters' products of x [T, K] to out [T, N]."""
        ops, matrix = self.slots.adapter_ops, self.slots.matrix(layer, product)
        inputs = self.slots.ops.dequantise_rows(x) if isinstance(x, Fp8Rows) else x
        ops.lora_expand(ops.lora_shrink(inputs, matrix, self.rows), matrix, self.rows, out)


def adapter_rows(slots: np.ndarray, ops: Ops) -> AdapterRows:
    """Group int32[T] slots of rows (NO_SLOT: none) by slot, on the device."""
    rows = np.flatnonzero(slots != NO_SLOT).astype(np.int32)
    rows = rows[np.argsort(slots[rows], kind="stable")]
    used, firsts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
    runs = np.stack([used, firsts, counts], axis=1).astype(np.int32)
    sent_rows, sent_runs = ops.upload_all([rows, runs])
    return AdapterRows(sent_rows, sent_runs, int(counts.max(initial=0)))

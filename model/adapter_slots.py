"""Slots of LoRA adapters on the device, and the part of a step's batch that uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.ops.interface import AdapterMatrix, AdapterOps, AdapterRows, Array, Fp8Rows, Ops
from model.weights.lora.adapter import LoraAdapter, product_shapes

NO_SLOT = -1
"""Slot of a row without an adapter, in `ForwardInputs.adapter_slots`."""


class AdapterSlots:
    def __init__(self, config: ModelConfig, ops: Ops, adapter_ops: AdapterOps, num_slots: int, max_rank: int):
        """Allocate `num_slots` adapters of rank `max_rank` for every product of every layer."""
        self.ops = ops
        self.adapter_ops = adapter_ops
        self.num_slots = num_slots
        self._layers = tuple(
            {name: self._matrix(shape, num_slots, max_rank) for name, shape in product_shapes(config, layer).items()}
            for layer in range(config.num_layers)
        )

    def matrix(self, layer: int, product: str) -> AdapterMatrix:
        return self._layers[layer][product]

    def write(self, slot: int, adapter: LoraAdapter) -> None:
        """Replace the slot's adapter; its rank is at most `max_rank`."""
        for layer, matrices in enumerate(self._layers):
            for product, matrix in matrices.items():
                self._write_matrix(matrix, slot, adapter.products.get((layer, product), {}))

    def _matrix(self, parts: Sequence[tuple[int, int]], num_slots: int, max_rank: int) -> AdapterMatrix:
        """Allocate for parts of (N, K)."""
        ends = np.cumsum([num_outputs for num_outputs, _ in parts]).tolist()
        return AdapterMatrix(
            a=self.ops.empty((num_slots, len(parts), max_rank, parts[0][1]), self.ops.dtype),
            b=self.ops.empty((num_slots, ends[-1], max_rank), self.ops.dtype),
            ranks=self.ops.upload(np.zeros(num_slots, np.int32)),
            part_ends=tuple(ends),
        )

    def _write_matrix(
        self, matrix: AdapterMatrix, slot: int, parts: Mapping[int, tuple[np.ndarray, np.ndarray]]
    ) -> None:
        rank = max((len(a) for a, _ in parts.values()), default=0)
        matrix.ranks[slot] = rank
        if not rank:
            return
        first = 0
        for part, end in enumerate(matrix.part_ends):
            matrix.a[slot, part], matrix.b[slot, first:end] = 0, 0
            if part in parts:
                a, b = parts[part]
                matrix.a[slot, part, : len(a)] = self.ops.upload(a)
                matrix.b[slot, first:end, : len(a)] = self.ops.upload(b)
            first = end


def slot_bytes(config: ModelConfig, dtype: np.dtype, max_rank: int) -> int:
    """Return the bytes of one slot."""
    shapes = [shape for layer in range(config.num_layers) for shape in product_shapes(config, layer).values()]
    return sum(max_rank * sum(map(sum, parts)) for parts in shapes) * dtype.itemsize


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

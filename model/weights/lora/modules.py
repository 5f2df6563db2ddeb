"""Reads modules of an adapter's file into its memory. Plans can be sent to other processes that map the memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from model.weights.lora.products import Part
from model.weights.lora.scaler import Scaler
from model.weights.safetensors_file import StoredFile, StoredTensor


class PlannedTensor(NamedTuple):
    """A matrix: its place in the file and in the memory."""

    name: str
    dtype: np.dtype  # in the file
    shape: tuple[int, ...]
    offset: int  # in the file
    begin: int  # in the memory

    def values(self, memory: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return its values in `dtype`, a view of `memory` uint8[n]."""
        end = self.begin + math.prod(self.shape) * dtype.itemsize
        return memory[self.begin : end].view(dtype).reshape(self.shape)


class PlannedModule(NamedTuple):
    name: str
    rank: int
    scale: float
    a: PlannedTensor  # [r, K]
    b: PlannedTensor  # [N, r]
    row_order: np.ndarray | None  # of B, where loading reorders the weight's rows

    def part(self, memory: np.ndarray, dtype: np.dtype) -> Part:
        return self.a.values(memory, dtype), self.b.values(memory, dtype)


def read_modules(
    file: StoredFile, modules: Sequence[PlannedModule], memory: np.ndarray, dtype: np.dtype
) -> list[bytes]:
    """Read modules to `memory`, uint8[n], as `dtype`; return each one's digest (name, rank, scale, stored values).
    Raises ModelError."""
    scaler = Scaler(dtype)
    return [_read(file, module, memory, scaler) for module in modules]


def _read(file: StoredFile, module: PlannedModule, memory: np.ndarray, scaler: Scaler) -> bytes:
    digest = hashlib.sha256(f"{module.name} {module.rank} {module.scale!r}".encode())
    for planned, factor in ((module.a, 1.0), (module.b, module.scale)):
        tensor = StoredTensor(planned.name, file, planned.dtype, planned.shape, planned.offset)
        values = planned.values(memory, scaler.dtype)
        stored = values if tensor.dtype == values.dtype else np.empty(tensor.shape, tensor.dtype)
        tensor.read_into(0, stored)
        digest.update(stored.reshape(-1).view(np.uint8).data)
        if not scaler.scale(stored, factor, values):
            raise tensor.error(f"NaN or infinity in {scaler.dtype.name}")
    if module.row_order is not None:
        b = module.b.values(memory, scaler.dtype)
        b[:] = b[module.row_order]
    return digest.digest()

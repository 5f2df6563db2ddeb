"""Packs small arrays into one buffer, for one copy per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT_BYTES = 16
"""Alignment for vector loads."""


@dataclass(frozen=True)
class Packing:
    """Offsets of arrays in one buffer."""

    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Packing:
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(offsets), end)

    def fill(self, piece: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays into `piece` uint8[>= num_bytes]."""
        for offset, array in zip(self.offsets, arrays, strict=True):
            piece[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def views(self, piece: Any, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Return views of `piece`, with the dtypes and shapes of `arrays`."""
        return [
            piece[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            for offset, array in zip(self.offsets, arrays, strict=True)
        ]


class TableRows(NamedTuple):
    """Rows of a device table to set: table[places, :w] = host."""

    host: np.ndarray  # int32[n, w]
    places: np.ndarray  # int32[n], unique
    table: Any  # int32[any, at least w]

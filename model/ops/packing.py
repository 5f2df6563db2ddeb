"""Several small arrays in one piece of memory, so that one copy carries all a step needs to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT_BYTES = 16
"""Every array starts at a multiple of this, so that kernels may read it in vectors."""


@dataclass(frozen=True)
class Packing:
    """Where each array lies in the piece."""

    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Packing:
        """One after the other, in order."""
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(offsets), end)

    def fill(self, piece: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Copy the arrays into `piece` uint8[num_bytes or more]."""
        for offset, array in zip(self.offsets, arrays, strict=True):
            piece[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def views(self, piece: Any, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Arrays of the same dtypes and shapes as `arrays`, in `piece`, which may be a backend's."""
        return [
            piece[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            for offset, array in zip(self.offsets, arrays, strict=True)
        ]


class TableRows(NamedTuple):
    """What goes into some rows of a table of the device: table[places, :w] = host."""

    host: np.ndarray  # int32[n, w]
    places: np.ndarray  # int32[n], none twice
    table: Any  # int32[any, at least w]

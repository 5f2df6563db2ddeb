"""Scaling of an adapter's values in the activations' dtype."""

from __future__ import annotations

import numpy as np

from model.dtypes import all_finite

PIECE = 1 << 16
"""Values converted at once, in memory that stays in a core's cache."""


class Scaler:
    """Multiplier and caster of arrays to `dtype`, for one thread."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        self._memory = np.empty(PIECE, np.float32)

    def scale(self, stored: np.ndarray, factor: float, out: np.ndarray) -> bool:
        """Write values times a factor to `out` (which may be `stored`), rounded once. Return True if all are finite."""
        if not all_finite(stored):
            return False
        if factor == 1 and out is stored:
            return True
        values, results = stored.reshape(-1), out.reshape(-1)
        with np.errstate(over="ignore"):
            for start in range(0, values.size, PIECE):
                piece = values[start : start + PIECE]
                wide = self._memory[: piece.size]
                wide[...] = piece
                wide *= np.float32(factor)
                results[start : start + PIECE] = wide
        return all_finite(out)

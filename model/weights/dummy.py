"""Random weights instead of a folder's, for measurements."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.ops.weight import WeightFormat
from model.weights.checkpoint import Checkpoint
from model.weights.formats.stored_matrix import StoredMatrix

RANDOM_TILE = 1_000_003
"""Length of the repeated random numbers; a prime, so that rows differ."""


BYTE_STDS = {WeightFormat.FP8: 97.0, WeightFormat.FP8_BLOCK: 97.0, WeightFormat.INT8: 74.0, WeightFormat.INT4: 4.6}
"""Standard deviation of the values of random bytes."""


class DummyWeights:
    """Random weights; every norm is 1.

    With experts, each tensor starts at another random number: equal layers would route all tokens to the same experts.
    """

    def __init__(self, config: ModelConfig, dtype: np.dtype, checkpoint: Checkpoint | None = None):
        """Copy the forms of a quantised `checkpoint`."""
        random = np.random.default_rng(0)
        self._std = config.hidden_size**-0.5
        self._tile = (random.standard_normal(RANDOM_TILE, np.float32) * np.float32(self._std)).astype(dtype)
        self._bytes = random.integers(0, 256, RANDOM_TILE, np.uint8)
        self._checkpoint = checkpoint
        self._shifts = config.experts is not None

    def matrix(self, name: str) -> StoredMatrix | None:
        stored = None if self._checkpoint is None else self._checkpoint.matrix(name)
        if stored is None:
            return None
        tile, std = self._bytes, BYTE_STDS[stored.form.format]
        if stored.form.format in (WeightFormat.FP8, WeightFormat.FP8_BLOCK):
            tile = tile & np.uint8(0xF7)  # without NaN
        rows = {
            "data": _TiledRows(tile, self._shift(name)),
            "scale": _TiledRows(np.full(1, self._std / std, np.float32)),
        }
        rows["zero_point"] = _TiledRows(np.full(1, 8, np.uint8))
        return replace(stored, arrays={array: rows[array] for array in stored.arrays})

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        if name.endswith("norm.weight"):
            out[:] = 1
            return
        _repeat(self._tile, start + self._shift(name), out)

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        return ModelError(f"dummy weights: tensor {name!r}: not finite in {dtype.name}")

    def kv_scales(self) -> np.ndarray | None:
        return None

    def _shift(self, name: str) -> int:
        return zlib.crc32(name.encode()) if self._shifts else 0


@dataclass(frozen=True)
class _TiledRows:
    tile: np.ndarray
    shift: int = 0

    def read_into(self, start: int, out: np.ndarray) -> None:
        values = out.view(np.uint8) if self.tile.dtype == np.uint8 else out
        if self.tile.size == 1:
            values[...] = self.tile[0]
        else:
            _repeat(self.tile, start + self.shift, values)


def _repeat(tile: np.ndarray, start: int, out: np.ndarray) -> None:
    offset = start % tile.size
    borders = [0, *range(tile.size - offset, out.size, tile.size), out.size]
    for begin, end in pairwise(borders):
        first = (offset + begin) % tile.size
        out[begin:end] = tile[first : first + end - begin]

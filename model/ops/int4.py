"""The GPU's tiled layout of 4-bit weights (cuda/common/int4.cuh)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.ops.weight import Weight, WeightFormat

TILE_ROWS = 16
SPAN_BYTES = 1024
"""Bytes of TILE_ROWS rows of a span."""

SPAN = 128
"""Columns read at once; divides K."""

DEFAULT_ZERO = 8


def can_tile(weight: Weight) -> bool:
    """Return whether the kernels support this INT4 weight: whole tiles and spans, groups of 32, 64 or multiples of
    128."""
    num_rows, num_columns = weight.shape
    group_size = weight.group_size
    has_groups = group_size in (32, 64) or (group_size > 0 and group_size % SPAN == 0)
    return num_rows % TILE_ROWS == 0 and num_columns % SPAN == 0 and has_groups and num_columns % group_size == 0


def tile(weight: Weight) -> Weight:
    """Return an INT4 weight as INT4_TILED; reference of cuda/linear/pack_int4.cu."""
    num_rows, num_columns = weight.shape
    # [N / 16, row g or g + 8, g, K / 128, half of a span, step, chunk of 8 columns, t]
    data = weight.data.reshape(num_rows // TILE_ROWS, 2, 8, num_columns // SPAN, 2, 4, 2, 4)
    pairs = data.transpose(3, 0, 4, 2, 7, 5, 6, 1).astype(np.uint32).reshape(-1, 4)  # a word's four bytes
    shifts = np.arange(4, dtype=np.uint32) * 4
    words = ((pairs & 15) << shifts | (pairs >> 4) << (shifts + 16)).sum(axis=-1, dtype=np.uint32)
    tiles = words.reshape(num_columns // SPAN, num_rows // TILE_ROWS, -1).view(np.uint8)
    zero_point = None if weight.zero_point is None else _tile_groups(weight.zero_point)
    scale = _tile_groups(np.asarray(weight.scale))
    return replace(weight, data=tiles, format=WeightFormat.INT4_TILED, scale=scale, zero_point=zero_point)


def _tile_groups(values: np.ndarray) -> np.ndarray:
    """[N, K / G] -> [K / G, N / 16, 16], rows g and g + 8 adjacent."""
    num_rows, num_groups = values.shape
    halves = values.reshape(num_rows // TILE_ROWS, 2, 8, num_groups)
    return np.ascontiguousarray(halves.transpose(3, 0, 2, 1)).reshape(num_groups, num_rows // TILE_ROWS, TILE_ROWS)

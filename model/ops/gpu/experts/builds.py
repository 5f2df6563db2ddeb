"""Builds of the kernels of experts, chosen by host integers: how many pairs and experts, not which."""

from __future__ import annotations

from dataclasses import replace

from model.ops.gpu.linear_builds import GemvBuild, SmallMBuild
from model.ops.gpu.w8.builds import GemvW8Build, SmallMW8Build

MAX_EXPERTS = 1024
GEMV_PAIRS = 8
"""Mean pairs of an expert up to which weights are read once by the GEMV kernels; not measured yet."""

_GEMV = (GemvBuild(4, 1, 128, 3, 4), GemvBuild(4, 1, 128, 3, 3, col_tiles=2))
_GEMV_W8 = tuple(GemvW8Build(4, 1, 128, 4, 4, col_tiles) for col_tiles in (1, 2))
_TILE_ROWS = 128
_COLS = (32, 64, 128)  # sorted pairs of a tile
_STATIC_BYTES = 4 * MAX_EXPERTS  # `ends` of experts_sm90.cu
_MIN_STAGES = 3


def gemv_build(num_rows: int, mean_pairs: float) -> GemvBuild:
    """Return the build of experts_gemv for `num_rows` rows and the pairs of a mean expert."""
    return _GEMV[_takes_two_tiles(num_rows, mean_pairs)]


def gemv_w8_build(num_rows: int, mean_pairs: float) -> GemvW8Build:
    """Return the build of experts_gemv_w8."""
    return _GEMV_W8[_takes_two_tiles(num_rows, mean_pairs)]


def takes_sm90(num_rows: int, mean_pairs: float) -> bool:
    """Return whether experts have more rows than the GEMV kernels read weights once for.

    The two add in different orders: a row's last bits depend on the number of rows in its step, as `linear`'s do.
    """
    return num_rows > 2 * GEMV_PAIRS and mean_pairs > GEMV_PAIRS


def sm90_build(mean_pairs: float, is_fp8: bool, max_shared_bytes: int) -> SmallMBuild | SmallMW8Build | None:
    """Return the build of experts_sm90, None if shared memory is short."""
    cols = next((cols for cols in _COLS if cols >= mean_pairs), _COLS[-1])
    one: SmallMBuild | SmallMW8Build
    one = SmallMW8Build(_TILE_ROWS, cols, 1, 1, 1) if is_fp8 else SmallMBuild(_TILE_ROWS, cols, 1, 1)
    of_stage = replace(one, stages=2).shared_bytes - one.shared_bytes
    stages = 1 + (max_shared_bytes - _STATIC_BYTES - one.shared_bytes) // of_stage
    return replace(one, stages=stages) if stages >= _MIN_STAGES else None


def _takes_two_tiles(num_rows: int, mean_pairs: float) -> bool:
    return num_rows > GEMV_PAIRS and mean_pairs > GEMV_PAIRS / 2

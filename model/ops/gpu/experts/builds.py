"""Builds of the expert kernels, chosen by the numbers of pairs and experts, not by which they are."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from model.ops.gpu.int4.builds import BLOCK_ROWS, Int4Layout, SmallMW4Build
from model.ops.gpu.linear_builds import GemvBuild, SmallMBuild, num_stages
from model.ops.gpu.w8.builds import GemvW8Build, SmallMW8Build

MAX_EXPERTS = 1024
MAX_GEMV_ROWS = 16
"""Most rows for which the GEMV kernels compute every product, so that a row's bits do not depend on the number of
rows."""

MIN_SM90_PAIRS, MIN_DENSE_SM90_PAIRS = 2, 5
"""Mean pairs per expert from which the Hopper kernels take more rows, for quantised and for 16-bit weights.

H200, a layer of Qwen3-30B-A3B at 2 and 4 pairs: fp8 168 and 193 us, by GEMV 285 and 322; 4-bit 174 and 199, by GEMV 290
and 278. bf16 at 4 and 6 pairs: 309 and 316, by GEMV 311 and 340.
"""

MAX_REREAD_PAIRS = 48
"""Most mean pairs per expert for which the GEMV kernels reread 8-bit weights for every 16 pairs; with more, experts are
widened for experts_sm90. H200, a layer in fp8-block: 921 us at 32 pairs, widened 1,248; 1,652 at 64, widened 1,331."""


@dataclass(frozen=True)
class GemvW4Build:
    """Macros of experts_gemv_w4a16.cu, and its blocks per SM."""

    warps: int
    row_tiles: int
    col_tiles: int
    stages: int
    blocks_per_sm: int

    def defines(self, layout: Int4Layout) -> dict[str, int]:
        sizes = {"WARPS": self.warps, "ROW_TILES": self.row_tiles, "COL_TILES": self.col_tiles, "STAGES": self.stages}
        return sizes | layout.defines

    def shared_bytes(self, layout: Int4Layout) -> int:
        ring = self.stages * self.row_tiles * (_SPAN_BYTES + layout.parameter_bytes)
        sums = 2 * 8 * self.col_tiles * BLOCK_ROWS * self.row_tiles * 4
        return self.warps * (ring + sums)


_GEMV = (GemvBuild(4, 1, 128, 3, 4), GemvBuild(4, 1, 128, 3, 3, col_tiles=2))
_GEMV_W8 = tuple(GemvW8Build(4, 1, 128, 4, 4, col_tiles) for col_tiles in (1, 2))
_GEMV_W4 = (GemvW4Build(4, 1, 1, 4, 4), GemvW4Build(4, 1, 2, 4, 4))
_SPAN_BYTES = 1024  # of 16 rows of 4-bit weights
_TILE_ROWS = 128
_TILE_PAIRS = 8  # pairs that the GEMV kernels take at once, or twice as many
_COLS = (32, 64, 128)  # sorted pairs per tile
_STATIC_BYTES = 4 * MAX_EXPERTS + 128  # of the Hopper kernels: `ends` and block_scan's
_MIN_STAGES = 3


def gemv_build(num_rows: int, mean_pairs: float) -> GemvBuild:
    """Return the build of experts_gemv for `num_rows` rows and `mean_pairs` pairs per expert."""
    return _GEMV[_takes_two_tiles(num_rows, mean_pairs)]


def gemv_w8_build(num_rows: int, mean_pairs: float) -> GemvW8Build:
    return _GEMV_W8[_takes_two_tiles(num_rows, mean_pairs)]


def gemv_w4_build(num_rows: int, mean_pairs: float) -> GemvW4Build:
    return _GEMV_W4[_takes_two_tiles(num_rows, mean_pairs)]


def takes_sm90(num_rows: int, mean_pairs: float, is_dense: bool) -> bool:
    """Return whether the Hopper kernels are faster.

    They sum in another order than the GEMV kernels: a row's last bits depend on the number of rows in its step.
    """
    return num_rows > MAX_GEMV_ROWS and mean_pairs >= (MIN_DENSE_SM90_PAIRS if is_dense else MIN_SM90_PAIRS)


def sm90_build(mean_pairs: float, is_fp8: bool, max_shared_bytes: int) -> SmallMBuild | SmallMW8Build | None:
    """Return the build of experts_sm90, or None if shared memory is too small."""
    return _sm90_build(_cols(mean_pairs), is_fp8, max_shared_bytes - _STATIC_BYTES)


def w4_sm90_build(mean_pairs: float, layout: Int4Layout, max_shared_bytes: int) -> SmallMW4Build | None:
    """Return the build of experts_w4a16_sm90, or None if shared memory is too small."""
    return _w4_sm90_build(_cols(mean_pairs), layout, max_shared_bytes - _STATIC_BYTES)


@functools.cache
def _sm90_build(cols: int, is_fp8: bool, all_bytes: int) -> SmallMBuild | SmallMW8Build | None:
    one: SmallMBuild | SmallMW8Build
    one = SmallMW8Build(_TILE_ROWS, cols, 1, 1, 1) if is_fp8 else SmallMBuild(_TILE_ROWS, cols, 1, 1)
    stages = num_stages(one.shared_bytes, replace(one, stages=2).shared_bytes, all_bytes)
    return replace(one, stages=stages) if stages >= _MIN_STAGES else None


@functools.cache
def _w4_sm90_build(cols: int, layout: Int4Layout, all_bytes: int) -> SmallMW4Build | None:
    one = SmallMW4Build(_TILE_ROWS // BLOCK_ROWS, cols, 1, 1, layout)
    stages = num_stages(one.shared_bytes, replace(one, stages=2).shared_bytes, all_bytes)
    return replace(one, stages=stages) if stages >= _MIN_STAGES else None


def _cols(mean_pairs: float) -> int:
    return next((cols for cols in _COLS if cols >= mean_pairs), _COLS[-1])


def _takes_two_tiles(num_rows: int, mean_pairs: float) -> bool:
    return num_rows > _TILE_PAIRS and mean_pairs > _TILE_PAIRS / 2

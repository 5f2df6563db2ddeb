"""Builds of `gemv_w4a16.cu` and `small_m_w4a16_sm90.cu`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from model.ops.gpu.linear_builds import AHEAD_BYTES, num_stages, persistent_blocks

BLOCK_ROWS = 16
"""Weight rows of a tile; divides N."""

SPAN = 128
"""Columns of a stage; divides K."""

_SPAN_BYTES = 1024  # bytes of 16 rows of a span
_MIN_STAGES = 3
_COLS = (32, 64, 96, 128, 192, 256)  # rows of x in a product
_MAX_BLOCKS = {32: 16, 64: 16, 96: 16, 128: 16, 192: 12, 256: 8}  # most groups of 16 weight rows that registers allow
_MIN_BLOCKS = 4
_SPLITS = (1, 2)  # with 4, only 29 clusters fit an H200 at once
_SPLIT_ROWS = 64  # rows of x for which SPLIT is chosen
_FEW_COLS, _FEW_AHEAD_BYTES = 64, 8 << 10
"""AHEAD_BYTES of tiles with few rows of x. H200, a pass of 64 rows of Llama-3.1-8B: 5,234 us, with 32 KiB 5,268."""

# H200, us: fitted to 380 measured products (4 % rms); one warpgroup from 128 rows on is interpolated
_SPAN_US = {
    32: (0.27, 0.41, 0.54, 0.76),
    64: (0.33, 0.53, 0.80, 1.00),
    96: (0.34, 0.77, 0.88, 1.19),
    128: (0.41, 0.73, 1.05, 1.41),
    192: (0.56, 1.00, 1.54),
    256: (0.73, 1.37),
}
"""Time per span of a tile, by rows of x, then by warpgroups."""
_ROUND_US = 2.8
_REDUCTION_US = 1.1


@dataclass(frozen=True)
class Int4Layout:
    groups: int  # input groups per span: 1 (larger groups too), 2 or 4
    has_zeros: bool
    is_bf16: bool  # dtype of the scales

    @property
    def defines(self) -> dict[str, int]:
        return {"GROUPS": self.groups, "ZEROS": int(self.has_zeros), "SCALE_BF16": int(self.is_bf16)}

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters per 16 rows of a span."""
        return self.groups * BLOCK_ROWS * (3 if self.has_zeros else 2)


@dataclass(frozen=True)
class GemvW4Build:
    """Macros of gemv_w4a16.cu, one block per SM."""

    row_tiles: int
    x_rows: int
    stages: int
    warps: int = 16
    shares_sm: bool = False  # leaves half of an SM's registers to other kernels
    fills: bool = False  # refetches into a stage once it is read

    def defines(self, layout: Int4Layout) -> dict[str, int]:
        sizes = {"WARPS": self.warps, "ROW_TILES": self.row_tiles, "X_ROWS": self.x_rows, "STAGES": self.stages}
        if self.fills:
            sizes["FILL"] = 1
        return sizes | {"BLOCKS_PER_SM": 1 + self.shares_sm} | layout.defines

    def shared_bytes(self, k: int, layout: Int4Layout) -> int:
        ring = self.stages * self.row_tiles * (_SPAN_BYTES + layout.parameter_bytes)
        sums = 2 * self.x_rows * BLOCK_ROWS * self.row_tiles * 4
        needed = self.warps * (ring + sums) + self.x_rows * 2 * k
        return max(needed, _OWN_SM_BYTES) if self.shares_sm else needed

    def num_blocks(self, n: int, num_sms: int) -> int:
        return min(math.ceil(n / (BLOCK_ROWS * self.row_tiles)), num_sms)


GEMV_X_ROWS = (1, 4, 8, 16)
_GEMV_STAGES, _LARGE_STAGES = 2, 3
"""Stages, and stages of a one-row product with more tiles than SMs. H200, a pass of Llama-3.1-8B: 1,731 us, with 2
stages 1,753."""
_GEMV_ROW_TILES = (3, 2, 1)
_MAX_ROW_TILES = {1: 3, 4: 3, 8: 3, 16: 2}  # by rows of x, limited by registers
_MAX_LAUNCHES = 4  # more take longer than unpacking
_OWN_SM_BYTES = 116 << 10  # shared memory; two blocks do not fit an SM of Hopper
_SHARED_ROW_TILES = 2
"""ROW_TILES of a small one-row product, which leaves registers to other kernels. H200, a step of Llama-3.1-8B: 1,798 us
with 2 for qkv; 1,872 with 3, which need all registers."""


def gemv_w4_build(
    num_rows: int, n: int, k: int, layout: Int4Layout, num_sms: int, max_shared_bytes: int, parts: int = 1
) -> GemvW4Build | None:
    """Return a build for `num_rows` rows of x in one or more launches, or None. `parts` is 2 with GATED."""
    if num_rows > GEMV_X_ROWS[-1]:
        return None
    sixteens = n // BLOCK_ROWS
    of_tile = [tiles for tiles in _GEMV_ROW_TILES if tiles <= sixteens and tiles % parts == 0]
    of_tile.sort(key=lambda tiles: tiles * math.ceil(math.ceil(sixteens / tiles) / num_sms))
    enough = next(x_rows for x_rows in GEMV_X_ROWS if x_rows >= num_rows)
    for x_rows in reversed([x_rows for x_rows in GEMV_X_ROWS if num_rows / _MAX_LAUNCHES <= x_rows <= enough]):
        for row_tiles in of_tile:
            build = GemvW4Build(row_tiles, x_rows, _GEMV_STAGES)
            is_small = row_tiles > _SHARED_ROW_TILES and math.ceil(sixteens / row_tiles) <= num_sms
            if num_rows == 1 and is_small and max_shared_bytes > _OWN_SM_BYTES:
                build = replace(build, row_tiles=_SHARED_ROW_TILES, shares_sm=True)
            if num_rows == 1 and math.ceil(sixteens / row_tiles) > num_sms:
                large = replace(build, stages=_LARGE_STAGES, fills=True)
                build = large if large.shared_bytes(k, layout) < max_shared_bytes else build
            if build.shared_bytes(k, layout) < max_shared_bytes and build.row_tiles <= _MAX_ROW_TILES[x_rows]:
                return build
    return None


@dataclass(frozen=True)
class SmallMW4Build:
    """Macros of small_m_w4a16_sm90.cu, one block per SM."""

    blocks: int
    cols: int
    split: int
    stages: int
    layout: Int4Layout

    @functools.cached_property
    def threads(self) -> int:
        return 128 * (math.ceil(self.blocks / 4) + 1)

    @functools.cached_property
    def defines(self) -> dict[str, int]:
        ahead_bytes = _FEW_AHEAD_BYTES if self.cols <= _FEW_COLS else AHEAD_BYTES
        ahead = min(self.stages, max(1, ahead_bytes // (self.blocks * _SPAN_BYTES)))
        sizes = {"BLOCKS": self.blocks, "COLS": self.cols, "SPLIT": self.split, "STAGES": self.stages}
        return sizes | {"AHEAD": ahead, "SHARED_BYTES": self.shared_bytes} | self.layout.defines

    @functools.cached_property
    def shared_bytes(self) -> int:
        stage = self.cols * SPAN * 2 + self.blocks * (_SPAN_BYTES + self.layout.parameter_bytes)
        return 1024 + self.stages * (stage + 16) + 16

    def num_blocks(self, m: int, n: int, num_sms: int) -> int:
        tiles = math.ceil(n / (BLOCK_ROWS * self.blocks)) * math.ceil(m / self.cols)
        if self.split > 1:
            return self.split * tiles
        return persistent_blocks(tiles, num_sms)


@functools.cache
def small_m_w4_build(
    m: int, n: int, k: int, layout: Int4Layout, num_sms: int, max_shared_bytes: int
) -> SmallMW4Build | None:
    """Return the build with the least estimated time for `m` rows of x and weights [n, k], or None.

    SPLIT, and so the summation order, depends on n and k alone: a row has the same bits in any batch.
    """
    product = _Product(m, n // BLOCK_ROWS, k // SPAN, num_sms)
    split = _best_split(n // BLOCK_ROWS, k // SPAN, num_sms)
    tiles = [(cols, blocks) for cols in _COLS for blocks in range(_MIN_BLOCKS, _MAX_BLOCKS[cols] + 1)]
    tiles.sort(key=lambda tile: (product.us(tile[0], tile[1], split), -tile[1]))
    for cols, blocks in tiles:
        one, two = (SmallMW4Build(blocks, cols, split, stages, layout) for stages in (1, 2))
        stages = num_stages(one.shared_bytes, two.shared_bytes, max_shared_bytes)
        if stages >= _MIN_STAGES:
            return replace(one, stages=stages)
    return None


@functools.cache
def _best_split(sixteens: int, spans: int, num_sms: int) -> int:
    product = _Product(_SPLIT_ROWS, sixteens, spans, num_sms)
    sizes = range(_MIN_BLOCKS, _MAX_BLOCKS[_SPLIT_ROWS] + 1)
    splits = [split for split in _SPLITS if split <= spans]
    return min(splits, key=lambda split: min(product.us(_SPLIT_ROWS, blocks, split) for blocks in sizes))


@dataclass(frozen=True)
class _Product:
    rows: int  # rows of x
    sixteens: int  # groups of 16 weight rows
    spans: int
    num_sms: int

    def us(self, cols: int, blocks: int, split: int) -> float:
        """Return the estimated time in us with such tiles."""
        tiles = math.ceil(self.sixteens / blocks) * math.ceil(self.rows / cols)
        places = self.num_sms // split
        of_tile = self.spans / split * _SPAN_US[cols][math.ceil(blocks / 4) - 1]
        return math.ceil(tiles / places) * (of_tile + _ROUND_US + (_REDUCTION_US if split > 1 else 0))

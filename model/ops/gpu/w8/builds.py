"""Builds of the kernels for 8-bit weights."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from model.ops.gpu.linear_builds import AHEAD_BYTES, num_stages, persistent_blocks

_SPAN_BYTES = 128  # per row and stage
_MIN_TILE_ROWS, _FEW_TILE_ROWS, _MAX_TILE_ROWS = 32, 48, 128
_MAX_READING_ROWS = 128  # rows of x; more take longer than reading the weights
_MIN_STAGES = 3
_EIGHT = 8  # rows of a swizzle
_FP8_COLS = (16, 32, 64, 96, 128, 192, 256)  # rows of x in a product
_W8A16_COLS = (32, 64, 96, 128, 192)
_X_ROWS = (1, 2, 4)  # rows of x of few_rows_fp8_sm90
_WINDOW_BYTES = 48 << 10
"""Bytes of weights that few_rows_fp8_sm90 keeps in flight per SM. H200, a pass of one row of Llama-3.1-8B: 2,586 us;
with 32 KiB 2,809, 64 KiB 2,595, 96 KiB 2,635."""

MAX_SMALL_M_ROWS = _FP8_COLS[-1]
"""Most rows of x for small_m_fp8_sm90."""

MAX_FEW_ROWS, MAX_GATED_ROWS = 4, 2
"""Most rows of x for few_rows_fp8_sm90, without and with an MLP's activation: fastest up to there (H200,
Llama-3.1-8B)."""

MAX_W8A16_ROWS = _W8A16_COLS[-1]
"""Most rows of x for small_m_w8a16_sm90."""


@dataclass(frozen=True)
class GemvW8Build:
    """Macros of gemv_w8.cu, and its blocks per SM."""

    warps: int
    row_tiles: int
    span: int
    stages: int
    blocks_per_sm: int
    col_tiles: int

    @property
    def defines(self) -> dict[str, int]:
        sizes = {"WARPS": self.warps, "ROW_TILES": self.row_tiles, "COL_TILES": self.col_tiles}
        return sizes | {"SPAN": self.span, "STAGES": self.stages}

    @property
    def shared_bytes(self) -> int:
        rows = 16 * self.row_tiles
        return self.warps * rows * (self.stages * self.span + 2 * 8 * self.col_tiles * 4)

    def num_blocks(self, n: int, num_sms: int) -> int:
        return min(math.ceil(n / (16 * self.row_tiles)), self.blocks_per_sm * num_sms)


GEMV_W8_BUILDS = tuple(GemvW8Build(16, row_tiles, 128, 2, 1, col_tiles) for row_tiles in (2, 1) for col_tiles in (1, 2))
"""Preferred builds first; the last two need less shared memory."""


def gemv_w8_build(num_rows: int, max_shared_bytes: int) -> GemvW8Build | None:
    """Return a build for `num_rows` rows of x, or None."""
    for build in GEMV_W8_BUILDS:
        if num_rows <= 8 * build.col_tiles and build.shared_bytes <= max_shared_bytes:
            return build
    return None


@dataclass(frozen=True)
class SmallMW8Build:
    """Macros of small_m_fp8_sm90.cu (`x_boxes` 1) or small_m_w8a16_sm90.cu (2), one block per SM."""

    rows: int
    cols: int
    split: int
    stages: int
    x_boxes: int  # pieces of 128 bytes per row of x and stage

    @functools.cached_property
    def threads(self) -> int:
        return 128 * self._warpgroups + 32

    @functools.cached_property
    def defines(self) -> dict[str, int]:
        ahead = min(self.stages, max(1, AHEAD_BYTES // (self.rows * _SPAN_BYTES)))
        sizes = {"ROWS": self.rows, "COLS": self.cols, "SPLIT": self.split, "STAGES": self.stages}
        return sizes | {"AHEAD": ahead, "SHARED_BYTES": self.shared_bytes}

    @functools.cached_property
    def shared_bytes(self) -> int:
        sent = 128 * self._warpgroups * self.cols if self.split == 2 else 0
        x_rows = self.x_boxes * self.cols
        past = max(0, 64 * self._warpgroups - self.rows - x_rows) * _SPAN_BYTES
        ring = self.stages * (self.rows + x_rows) * _SPAN_BYTES
        scales = 4 * self.cols if self.x_boxes == 1 else 0
        return 1024 + ring + sent + 16 * self.stages + 8 + scales + past

    @functools.cached_property
    def _warpgroups(self) -> int:
        return math.ceil(self.rows / 64)

    def num_blocks(self, n: int, num_sms: int) -> int:
        tiles = math.ceil(n / self.rows)
        if self.split == 2:
            return 2 * tiles
        return persistent_blocks(tiles, num_sms)


@functools.cache
def small_m_fp8_build(m: int, n: int, num_sms: int, max_shared_bytes: int) -> SmallMW8Build | None:
    """Return the build for `m` rows of x and `n` rows of weights, both in e4m3, or None."""
    return _small_m_build(m, n, num_sms, max_shared_bytes, _FP8_COLS, 1)


@dataclass(frozen=True)
class FewRowsFp8Build:
    """Macros of few_rows_fp8_sm90.cu, one block per SM. Rows and split, and so the bits, are those of
    small_m_fp8_sm90."""

    rows: int
    split: int
    stages: int
    window: int  # stages in flight
    x_rows: int
    x_bytes: int

    @functools.cached_property
    def threads(self) -> int:
        return 128 * self.warpgroups + 32

    @functools.cached_property
    def defines(self) -> dict[str, int]:
        sizes = {"ROWS": self.rows, "COLS": _FP8_COLS[0], "SPLIT": self.split, "STAGES": self.stages, "AHEAD": 0}
        sizes |= {"WINDOW": min(self.window, self.stages), "X_ROWS": self.x_rows, "X_BYTES": self.x_bytes}
        return sizes | {"SHARED_BYTES": self.shared_bytes}

    @functools.cached_property
    def shared_bytes(self) -> int:
        cols = _FP8_COLS[0]
        sent = 128 * self.warpgroups * cols if self.split == 2 else 0
        past = max(0, 64 * self.warpgroups - self.rows) * _SPAN_BYTES
        ring = self.stages * (self.rows * _SPAN_BYTES + 16)
        return 1024 + ring + sent + 8 + 4 * cols + 8 + self.x_bytes + 128 + past

    @functools.cached_property
    def warpgroups(self) -> int:
        return math.ceil(self.rows / 64)

    def num_blocks(self, n: int, num_sms: int) -> int:
        tiles = math.ceil(n / self.rows)
        if self.split == 2:
            return 2 * tiles
        return persistent_blocks(tiles, num_sms)


@functools.cache
def few_rows_fp8_build(
    m: int, n: int, k: int, num_sms: int, max_shared_bytes: int, *, is_gated: bool = False
) -> FewRowsFp8Build | None:
    """Return the build for `m` rows of x and weights [n, k], both in e4m3, or None. `is_gated`: tiles hold as many
    groups of eight rows of gate as of up."""
    if m > (MAX_GATED_ROWS if is_gated else MAX_FEW_ROWS):
        return None
    other = small_m_fp8_build(m, n, num_sms, max_shared_bytes)
    if other is None or (is_gated and (other.split > 1 or n % 16)):
        return None
    if is_gated:
        other = replace(other, rows=min(_MAX_TILE_ROWS, 16 * math.ceil(other.rows / 16)))
    x_rows = next(rows for rows in _X_ROWS if rows >= m)
    spans = math.ceil(math.ceil(k / _SPAN_BYTES) / other.split)
    window = max(1, _WINDOW_BYTES // (other.rows * _SPAN_BYTES))
    one, two = (
        FewRowsFp8Build(other.rows, other.split, stages, window, x_rows, x_rows * spans * _SPAN_BYTES)
        for stages in (1, 2)
    )
    rounds = math.ceil(math.ceil(n / other.rows) * other.split / one.num_blocks(n, num_sms))
    stages = num_stages(one.shared_bytes, two.shared_bytes, max_shared_bytes)
    if stages < _MIN_STAGES:
        return None
    return replace(one, stages=max(_MIN_STAGES, min(stages, spans * rounds)))


@functools.cache
def small_m_w8a16_build(m: int, n: int, num_sms: int, max_shared_bytes: int) -> SmallMW8Build | None:
    """Return the build for `m` rows of 16-bit x and `n` rows of weights, or None."""
    return _small_m_build(m, n, num_sms, max_shared_bytes, _W8A16_COLS, 2)


def _small_m_build(
    m: int, n: int, num_sms: int, max_shared_bytes: int, all_cols: tuple[int, ...], x_boxes: int
) -> SmallMW8Build | None:
    """Return a build with equally many tiles per SM, or None.

    If such tiles would waste much of a warpgroup's 64 rows, two blocks split K. This depends on `n` alone, so that the
    summation order does not depend on `m`.
    """
    if m > all_cols[-1]:
        return None
    rounds = math.ceil(n / (num_sms * _MAX_TILE_ROWS))
    split = 2 if _tile_rows(n, num_sms * rounds) < _FEW_TILE_ROWS else 1
    rows = _MAX_TILE_ROWS
    if rounds == 1 or m <= _MAX_READING_ROWS:
        rows = _tile_rows(n, num_sms // split * rounds)
    cols = next(cols for cols in all_cols if cols >= m)
    one, two = (SmallMW8Build(rows, cols, split, stages, x_boxes) for stages in (1, 2))
    stages = num_stages(one.shared_bytes, two.shared_bytes, max_shared_bytes)
    return replace(one, stages=stages) if stages >= _MIN_STAGES else None


def _tile_rows(n: int, num_tiles: int) -> int:
    return max(_MIN_TILE_ROWS, _EIGHT * math.ceil(n / num_tiles / _EIGHT))

"""Builds of `gemv.cu` and `small_m_sm90.cu`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from model.ops.interface import MAX_EXACT_ROWS

SMALL_M_SPLITS = (1, 2)
"""Numbers of blocks that split K."""

MAX_SMALL_M_ROWS = 128
"""Most rows of x for small_m_sm90."""

AHEAD_BYTES = 32 << 10
"""Bytes of weights that an SM fetches before the previous kernel ends. H200: doubling this costs up to 1.7 us per
product, halving it 0.3 us."""

_MIN_ROWS_AHEAD, _MIN_WIDE_ROWS, _MAX_ROWS_AHEAD = 5, 13, 16
"""Exact rows: fewest that read x a step ahead, fewest in wide tiles, most of these that read ahead (registers). H200, a
layer of Llama-3.1-8B: 107.7 us instead of 108.5 (8 rows), 118.6 instead of 128.5 (16), 130.4 instead of 154.8 (24)."""

_MAX_SHARED_K, _ROW_PADDING_BYTES = 4096, 64
"""Most elements of a row of x in shared memory, as in add_norm_gemv; bytes between rows beyond whole lines."""

_MIN_SHARED_TILES = 8
"""Fewest tiles per block for which a few exact rows of x are copied to shared memory, unless they are read ahead in one
column of tiles. H200, a step of Llama-3.1-8B at 1,024 tokens: 4,089 us instead of 4,203 with 9 rows, but 3,867 instead
of 3,823 with 5."""

_SPAN_BYTES = 128
_TILE_ROWS = 128  # at most
_MIN_TILE_ROWS = 32
_EIGHT = 8  # rows of a swizzle


def num_stages(one_bytes: int, two_bytes: int, max_shared_bytes: int) -> int:
    """Return how many stages fit, given a build's bytes with one stage and with two."""
    return 1 + (max_shared_bytes - one_bytes) // (two_bytes - one_bytes)


def persistent_blocks(num_tiles: int, num_sms: int) -> int:
    """Return the fewest blocks, one per SM, that process `num_tiles` in as many rounds as `num_sms` blocks would."""
    return math.ceil(num_tiles / math.ceil(num_tiles / num_sms))


class GemvBuild(NamedTuple):
    """Macros of gemv.cu, and its blocks per SM. A row's summation order depends on warps and span alone."""

    warps: int
    row_tiles: int
    span: int
    stages: int
    blocks_per_sm: int
    col_tiles: int = 1
    steps: int = 1
    reads_x_ahead: bool = False
    kept_rows: int = 0  # rows whose sums are kept; 0: all columns
    is_streamed: bool = False  # weights are evicted from the L2 first
    row_bytes: int = 0  # bytes of x in shared memory; 0: x is read from memory
    fills: bool = False  # fills its rings before the previous kernel ends

    @property
    def max_rows(self) -> int:
        """Most rows of x."""
        return self.kept_rows or 8 * self.col_tiles

    @property
    def defines(self) -> dict[str, int]:
        sizes = {"WARPS": self.warps, "ROW_TILES": self.row_tiles, "COL_TILES": self.col_tiles}
        sizes |= {"SPAN": self.span, "STAGES": self.stages}
        if self.steps > 1:
            sizes["STEP"] = self.span // self.steps
        if self.kept_rows > 0:
            sizes["KEPT_ROWS"] = self.kept_rows
        if self.is_streamed:
            sizes["STREAMED"] = 1
        if self.row_bytes > 0:
            sizes["SHARES_ROWS"] = 1
        if self.fills:
            sizes["FILL"] = 1
        return sizes | {"X_AHEAD": 1} if self.reads_x_ahead else sizes

    @property
    def shared_bytes(self) -> int:
        """Bytes of rings, two sets of sums and x."""
        rows = 16 * self.row_tiles
        ring = self.warps * self.stages * rows * self.span // self.steps * 2
        return ring + 2 * self.warps * self.max_rows * rows * 4 + self.row_bytes


GEMV_BUILDS = (
    GemvBuild(16, 1, 128, 2, 1),
    GemvBuild(4, 1, 128, 3, 4),
    GemvBuild(8, 2, 128, 2, 1, col_tiles=2),
)
"""Preferred builds first; the second needs less shared memory."""


def gemv_build(num_rows: int, max_shared_bytes: int) -> int | None:
    """Return the index in GEMV_BUILDS for `num_rows` rows of x, or None.

    Different builds in neighbouring kernels slow each other (H200: up to 6 us a layer). The first build was the fastest
    of eleven for a layer of Llama-3.1-8B.
    """
    for index, build in enumerate(GEMV_BUILDS):
        if num_rows <= build.max_rows and build.shared_bytes <= max_shared_bytes:
            return index
    return None


def one_row_build(build: GemvBuild, k: int) -> GemvBuild:
    """Return a build for one row and K = `k`, with the summation order of `build`.

    A ring that holds no more than a tile is filled before the previous kernel ends. H200, a pass of one token:
    Llama-3.1-8B 3,844 us instead of 3,932, Qwen3-30B-A3B 2,425 instead of 2,453, or 2,477 if products with K = 2,048
    fill their rings too.
    """
    row_bytes = 2 * k if k <= _MAX_SHARED_K else 0
    return _filled(build, k)._replace(kept_rows=1, row_bytes=row_bytes)


def _filled(build: GemvBuild, k: int) -> GemvBuild:
    return build._replace(is_streamed=True, fills=k > build.warps * build.span)


def exact_gemv_build(
    index: int, num_rows: int, shape: tuple[int, int], num_sms: int, max_shared_bytes: int
) -> GemvBuild | None:
    """Return a build for `num_rows` rows of x and weights [N, K], with the summation order of GEMV_BUILDS[index], or
    None.

    Wide tiles have twice the weight rows, in half steps, so x is read half as often. Fewer rows fill their rings as in
    `one_row_build`. H200, a step of Llama-3.1-8B at 256 tokens: 3,878 us instead of 4,016 (5 rows), 4,178 instead of
    4,235 (9).
    """
    if num_rows > MAX_EXACT_ROWS:
        return None
    one_row = GEMV_BUILDS[index]
    build = one_row._replace(col_tiles=max(one_row.col_tiles, math.ceil(num_rows / _EIGHT)))
    builds = [build]
    if index == 0:
        if num_rows >= _MIN_WIDE_ROWS:
            builds.insert(0, _wide(build)._replace(reads_x_ahead=num_rows <= _MAX_ROWS_AHEAD))
        elif num_rows > 1:
            builds = _few_rows_builds(build, num_rows, shape, num_sms)
    return next((build for build in builds if build.shared_bytes <= max_shared_bytes), None)


def _wide(build: GemvBuild) -> GemvBuild:
    return build._replace(row_tiles=2 * build.row_tiles, steps=2)


def _few_rows_builds(build: GemvBuild, num_rows: int, shape: tuple[int, int], num_sms: int) -> list[GemvBuild]:
    """Return builds, preferred first: x in shared memory if a block has many tiles; wide tiles for more than eight rows
    if a block has one tile."""
    n, k = shape
    filled = _filled(build, k)._replace(reads_x_ahead=num_rows >= _MIN_ROWS_AHEAD)
    builds = [filled]
    if num_rows > _EIGHT and n <= 32 * build.row_tiles * num_sms:
        builds.insert(0, _wide(filled)._replace(kept_rows=num_rows))
    has_many_tiles = n >= _MIN_SHARED_TILES * 16 * build.row_tiles * num_sms
    if has_many_tiles and k <= _MAX_SHARED_K and not _MIN_ROWS_AHEAD <= num_rows <= _EIGHT:
        row_bytes = _SPAN_BYTES * math.ceil(2 * k / _SPAN_BYTES) + _ROW_PADDING_BYTES
        shared = filled._replace(row_bytes=num_rows * row_bytes, reads_x_ahead=False)
        builds = [shared, shared._replace(kept_rows=num_rows), *builds]
    return builds


@dataclass(frozen=True, order=True)
class SmallMBuild:
    """Macros of small_m_sm90.cu, one block per SM."""

    rows: int
    cols: int
    split: int
    stages: int

    @functools.cached_property
    def threads(self) -> int:
        return 128 * self._warpgroups + 32

    @functools.cached_property
    def defines(self) -> dict[str, int]:
        ahead = min(self.stages, AHEAD_BYTES // (self.rows * _SPAN_BYTES))
        sizes = {"ROWS": self.rows, "COLS": self.cols, "SPLIT": self.split, "STAGES": self.stages}
        return sizes | {"AHEAD": ahead, "SHARED_BYTES": self.shared_bytes}

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Bytes of the ring, the partner's sums, barriers, and rows past the ring."""
        sent = 128 * self._warpgroups * self.cols if self.split == 2 else 0
        past = max(0, 64 * self._warpgroups - self.rows - self.cols) * _SPAN_BYTES
        ring = self.stages * (self.rows + self.cols) * _SPAN_BYTES
        return 1024 + ring + sent + 16 * self.stages + 8 + past

    @functools.cached_property
    def _warpgroups(self) -> int:
        return math.ceil(self.rows / 64)

    def num_blocks(self, n: int, num_sms: int) -> int:
        tiles = math.ceil(n / self.rows)
        if self.split == 2:
            return 2 * tiles
        return persistent_blocks(tiles, num_sms)


@functools.cache
def small_m_build(split: int, m: int, n: int, num_sms: int, max_shared_bytes: int) -> SmallMBuild | None:
    """Return the build for `m` rows of x and `n` rows of weights, or None.

    Tiles are sized so that all SMs get equally many: 112 blocks on 132 SMs read gate_up of Llama-3.1-8B at 0.92 of the
    speed of 128 blocks.
    """
    places = num_sms // split
    rounds = math.ceil(n / (places * _TILE_ROWS))
    if m > MAX_SMALL_M_ROWS or (split == 2 and rounds > 1):
        return None
    rows = max(_MIN_TILE_ROWS, _EIGHT * math.ceil(n / (places * rounds) / _EIGHT))
    one = SmallMBuild(rows, 32 * math.ceil(m / 32), split, 1)
    stages = num_stages(one.shared_bytes, replace(one, stages=2).shared_bytes, max_shared_bytes)
    return replace(one, stages=stages) if stages >= 3 else None

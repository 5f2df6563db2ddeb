"""Products of few rows on Hopper with the rows' adapters applied in the same kernel, `adapted_product_sm90`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.gpu.launcher import KernelLauncher
from model.ops.gpu.linear_builds import SMALL_M_SPLITS, SmallMBuild, small_m_build
from model.ops.interface import Array, Fp8Rows
from model.ops.weight import Weight, WeightFormat

MIN_ROWS, MAX_ROWS = 8, 96
"""Fewest and most rows that gain. H200, products of a layer of Llama-3.1-8B, one adapter of rank 16 per row (at most
32): 125 us instead of 144 with `lora_shrink` and `lora_expand` at 8 rows, 138 instead of 172 at 24, 150 instead of 187
at 64."""

RINGS_BYTES = 64 << 10
"""Shared memory for the rings of a block's helpers: one ring each, for whole pieces of A and then of B."""

WIDE_RINGS_BYTES = 32 << 10
"""RINGS_BYTES for four helpers and more than 64 rows of x. H200, as above at 96 rows: 169 us, 188 with 64 KiB."""

NUM_ROOMS = 4
"""Launches whose sums have separate memory."""

STEP_RANKS = 16
_MAX_RANK_STEPS = 4
_TILE_ROWS = 16
_EIGHT = 8
_MAX_PARTS = 3
_MAX_UNIT_OUTPUTS = 48
_MAX_TWO_PARTS = 256  # most cols * rank_steps with two parts' operands in shared memory
_NUM_SPLITS = 4
_ROOM_WORDS = _NUM_SPLITS * MAX_ROWS * _MAX_PARTS * STEP_RANKS * _MAX_RANK_STEPS
_THREADS = 416
_WARPGROUP_ROWS = 64
_FEW_HELPERS, _MANY_HELPERS = 4, 8
_MANY_COLS = 64
_MAX_PIECES = 6
_MIN_STAGES = 3
_BARRIERS_BYTES = 800
_SPAN = 64  # elements per swizzled row
_UINT32, _UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)


@dataclass(frozen=True, order=True)
class ProductBuild(SmallMBuild):
    """Macros of adapted_product_sm90.cu."""

    rank_steps: int
    piece_bytes: int  # of A
    is_fp8: bool = False  # weights and x

    @functools.cached_property
    def threads(self) -> int:
        return _THREADS

    @functools.cached_property
    def defines(self) -> dict[str, int]:
        sizes = {"RANK_STEPS": self.rank_steps, "RINGS_BYTES": self._rings_bytes, "ROOM_WORDS": _ROOM_WORDS}
        return super().defines | sizes | {"WEIGHT_FP8": int(self.is_fp8)}

    @functools.cached_property
    def num_pieces(self) -> int:
        """Pieces of A per ring."""
        return min(_MAX_PIECES, self._rings_bytes // (self._helpers * self.piece_bytes))

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Bytes of the product, and of the helpers' barriers, operands, sums, lists and rings."""
        operands = 64 * self.cols * self.rank_steps
        if self.cols * self.rank_steps <= _MAX_TWO_PARTS:
            operands *= 2
        added = 4 * self.cols // self.split * (16 * math.ceil(self.rows / 16) + 4)
        lists = (24 if self.is_fp8 else 20) * self.cols
        return super().shared_bytes + _BARRIERS_BYTES + operands + added + lists + 1024 + self._rings_bytes

    @functools.cached_property
    def _helpers(self) -> int:
        """Number of helper warps."""
        return _MANY_HELPERS if self.rows <= _WARPGROUP_ROWS else _FEW_HELPERS

    @functools.cached_property
    def _rings_bytes(self) -> int:
        pieces = self._helpers * self.piece_bytes
        is_wide = self.cols > _MANY_COLS and self._helpers == _FEW_HELPERS
        return math.ceil((WIDE_RINGS_BYTES if is_wide else RINGS_BYTES) / pieces) * pieces


@functools.cache
def product_build(
    m: int, n: int, num_parts: int, max_rank: int, num_sms: int, max_shared_bytes: int, *, is_fp8: bool = False
) -> ProductBuild | None:
    """Return the build with the most stages for `m` rows of x, `n` rows of weights in parts, and adapters, or None."""
    rank_steps = max_rank // STEP_RANKS
    if max_rank % STEP_RANKS or not 0 < rank_steps <= _MAX_RANK_STEPS:
        return None
    piece_bytes = 2 * _SPAN * unit_outputs(num_parts * max_rank)
    for split in reversed(SMALL_M_SPLITS):
        plain = small_m_build(split, m, n, num_sms, max_shared_bytes)
        if plain is None:
            continue
        most = ProductBuild(plain.rows, plain.cols, split, plain.stages, rank_steps, piece_bytes, is_fp8)
        builds = (replace(most, stages=stages) for stages in range(most.stages, _MIN_STAGES - 1, -1))
        found = next((build for build in builds if build.shared_bytes <= max_shared_bytes), None)
        if found is not None:
            return found
    return None


class AdaptedProduct:
    """`AdapterOps.lora_linear` for 16-bit x and weights, or both in e4m3."""

    def __init__(self, device: KernelLauncher):
        self._device = device
        self._num_launched = 0

    def __call__(
        self, x: Array | Fp8Rows, weight: Weight, bias: Array | None, matrix: AdapterMatrix, adapters: AdapterRows
    ) -> Array | None:
        device, maps = self._device, self._device.tensor_maps
        build = _build(device, x, weight, matrix, adapters)
        if build is None:
            return None
        data, x_scale = (x.data, x.scale) if isinstance(x, Fp8Rows) else (x, None)
        (num_rows, k), (num_slots, n, max_rank), num_sorted = data.shape, matrix.b.shape, len(adapters.rows)
        width_16 = k // 2 if build.is_fp8 else k  # width of a row in 16-bit elements
        num_parts = len(matrix.part_ends)
        num_outputs, first_end, second_end = num_parts * max_rank, *(*matrix.part_ends, n, n)[: _MAX_PARTS - 1]
        out = device.temporary((num_rows, n), device.dtype)
        width = unit_outputs(num_outputs)
        counts = num_sorted, len(adapters.tiles), num_slots, num_parts, max_rank
        room, left = self._next_room()
        device.launch(
            "adapted_product_sm90",
            (build.num_blocks(n, device.num_sms),),
            (
                maps.get(data, (width_16, num_rows), (_SPAN, build.cols)),
                maps.get(weight.data, (width_16, n), (_SPAN, build.rows)),
                maps.get(matrix.a, (k, num_slots * num_outputs), (_SPAN, width)),
                data,
                x_scale,
                matrix.b,
                weight.scale,
                bias,
                out,
                room,
                adapters.rows,
                adapters.tiles,
                matrix.ranks,
                left,
                *map(
                    np.int32,
                    (num_rows, n, k, num_outputs // width, build.num_pieces, *counts, first_end, second_end, width),
                ),
            ),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            **build.defines,
        )
        return out

    def _next_room(self) -> tuple[Array, Array]:
        """Return uint64[_ROOM_WORDS] for tagged sums and uint32[2] for its launches.

        A product may start while the previous one uses its own, but not before the one preceding that has ended.
        """
        self._num_launched += 1
        number, zeros = self._num_launched % NUM_ROOMS, self._device.zeros
        return zeros((NUM_ROOMS, _ROOM_WORDS), _UINT64)[number], zeros((NUM_ROOMS, 2), _UINT32)[number]


def unit_outputs(num_outputs: int) -> int:
    """Return how many outputs of x @ A a block sums at once."""
    parts = (num_outputs // count for count in range(1, num_outputs) if num_outputs % (STEP_RANKS * count) == 0)
    return next(part for part in parts if part <= _MAX_UNIT_OUTPUTS)


def _build(
    device: KernelLauncher, x: Array | Fp8Rows, weight: Weight, matrix: AdapterMatrix, adapters: AdapterRows
) -> ProductBuild | None:
    _, n, max_rank = matrix.b.shape
    is_fp8 = isinstance(x, Fp8Rows)
    if weight.format is not (WeightFormat.FP8 if is_fp8 else WeightFormat.DENSE):
        return None
    m, k = (x.data if isinstance(x, Fp8Rows) else x).shape
    are_16_bits = device.dtype.itemsize == _UINT32.itemsize // 2
    are_whole = k % (2 * _EIGHT if is_fp8 else _EIGHT) == 0 and all(end % _EIGHT == 0 for end in matrix.part_ends)
    are_served = device.arch == "90a" and are_16_bits and adapters.tile_rows <= _TILE_ROWS and are_whole
    is_listed = len(adapters.tiles) <= m + m // _EIGHT  # the list is in shared memory
    if not are_served or not is_listed or not MIN_ROWS <= m <= MAX_ROWS:
        return None
    sizes = m, n, len(matrix.part_ends), max_rank
    return product_build(*sizes, device.num_sms, device.max_shared_bytes, is_fp8=is_fp8)

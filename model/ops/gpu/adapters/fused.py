"""Products of few rows on Hopper that add the rows' adapters before they round: `small_m_lora_sm90`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.gpu.launcher import KernelLauncher
from model.ops.gpu.linear_builds import SMALL_M_SPLITS, SmallMBuild, small_m_build
from model.ops.interface import Array

MIN_ROWS, MAX_ROWS = 8, 96
"""Rows that gain. H200, a layer of Llama-3.1-8B, an adapter for each row, up to 32: 137 us for 144 at 8 rows, 154 for
175 at 24, 172 for 189 at 64, 196 for 200 at 96; 131 for 131 at 1 and 223 for 213 at 128."""

ROOM_BYTES = 28 << 10
"""Shared memory left to blocks of `lora_shrink_few`. All of the ring is filled while they run."""

STEP_RANKS = 16
_MAX_RANK_STEPS = 4
_TILE_ROWS = 16
_EIGHT = 8
_NUM_MAPS = 3
_HELPER_THREADS = 128
_MIN_STAGES = 4
_SHRINK_THREADS = 128
_FLOAT32 = np.dtype(np.float32)

_SPLIT_INPUTS = 1024
"""SPLIT_INPUTS of lora_shrink_few.cu."""

Build = TypeVar("Build", bound=SmallMBuild)


@dataclass(frozen=True, order=True)
class AdaptedBuild(SmallMBuild):
    """Macros of small_m_lora_sm90.cu."""

    rank_steps: int

    @functools.cached_property
    def threads(self) -> int:
        return super().threads + _HELPER_THREADS

    @functools.cached_property
    def defines(self) -> dict[str, int]:
        return super().defines | {"AHEAD": self.stages, "RANK_STEPS": self.rank_steps}

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Bytes of the product, and of barriers, lists and operands of adapters."""
        barriers = 8 + 8 * (self.stages + self.stages % 2)
        lists = 4 * (self.cols + self.cols // 8) * self.rank_steps + 8 * self.cols + 16
        return super().shared_bytes + barriers + lists + 64 * self.cols * self.rank_steps


@functools.cache
def adapted_build(m: int, n: int, max_rank: int, num_sms: int, max_shared_bytes: int) -> AdaptedBuild | None:
    """Return the build for `m` rows of x, `n` of weights and adapters of `max_rank`, or None."""
    return most_stages(AdaptedBuild, _MIN_STAGES, (m, n, max_rank), num_sms, max_shared_bytes)


def most_stages(
    kind: Callable[[int, int, int, int, int], Build],
    min_stages: int,
    sizes: tuple[int, int, int],
    num_sms: int,
    max_shared_bytes: int,
) -> Build | None:
    """Return the build of `kind` with the most stages that fit, or None; `sizes` as in `adapted_build`."""
    m, n, max_rank = sizes
    rank_steps = max_rank // STEP_RANKS
    if max_rank % STEP_RANKS or not 0 < rank_steps <= _MAX_RANK_STEPS:
        return None
    for split in reversed(SMALL_M_SPLITS):
        plain = small_m_build(split, m, n, num_sms, max_shared_bytes)
        if plain is None:
            continue
        most = kind(plain.rows, plain.cols, split, plain.stages, rank_steps)
        builds = (replace(most, stages=stages) for stages in range(most.stages, min_stages - 1, -1))
        found = next((build for build in builds if build.shared_bytes <= max_shared_bytes), None)
        if found is not None:
            return found
    return None


def linear(
    device: KernelLauncher, operands: tuple[Array, Array, Array | None], matrix: AdapterMatrix, adapters: AdapterRows
) -> Array | None:
    """`AdapterOps.lora_linear` of x, dense weights and a bias."""
    x, weight, _ = operands
    build = _build(device, x, matrix, adapters)
    if build is None:
        return None
    out = device.temporary((len(x), len(weight)), device.dtype)
    _launch_product(device, build, operands, shrink(device, x, matrix, adapters), matrix, adapters, out)
    return out


def shrink(device: KernelLauncher, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> Array:
    """`AdapterOps.lora_shrink` for tiles of at most 16 rows and a rank of whole 16."""
    _, num_parts, max_rank, num_inputs = matrix.a.shape
    num_splits, num_rows = math.ceil(num_inputs / _SPLIT_INPUTS), len(adapters.rows)
    shrunk = device.temporary((num_splits, num_rows, num_parts, max_rank), _FLOAT32)
    sizes = map(np.int32, (num_rows, num_inputs, num_parts, max_rank))
    device.launch(
        "lora_shrink_few",
        (num_parts * max_rank // STEP_RANKS, len(adapters.tiles), num_splits),
        (shrunk, x, matrix.a, adapters.rows, adapters.tiles, matrix.ranks, *sizes),
        threads=_SHRINK_THREADS,
        overlaps=True,
    )
    return shrunk


def _launch_product(
    device: KernelLauncher,
    build: AdaptedBuild,
    operands: tuple[Array, Array, Array | None],
    shrunk: Array,
    matrix: AdapterMatrix,
    adapters: AdapterRows,
    out: Array,
) -> None:
    (x, weight, bias), maps = operands, device.tensor_maps
    (num_rows, k), (num_slots, n, max_rank) = x.shape, matrix.b.shape
    b_maps = [
        maps.get_narrow(
            matrix.b, begin * max_rank, (max_rank, end - begin, num_slots), (max_rank, n * max_rank), build.rows
        )
        for begin, end in pairwise((0, *matrix.part_ends))
    ]
    b_maps += b_maps[-1:] * (_NUM_MAPS - len(b_maps))
    first_end, second_end = (*matrix.part_ends, n, n)[: _NUM_MAPS - 1]
    counts = (len(shrunk), len(adapters.rows), len(adapters.tiles), len(matrix.part_ends), max_rank)
    device.launch(
        "small_m_lora_sm90",
        (build.num_blocks(n, device.num_sms),),
        (
            maps.get(x, (k, num_rows), (64, build.cols)),
            maps.get(weight, (k, n), (64, build.rows)),
            *b_maps,
            bias,
            out,
            shrunk,
            adapters.rows,
            adapters.tiles,
            matrix.ranks,
            *map(np.int32, (num_rows, n, k, *counts, first_end, second_end)),
        ),
        threads=build.threads,
        shared_bytes=build.shared_bytes,
        overlaps=True,
        **build.defines,
    )


def _build(device: KernelLauncher, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> AdaptedBuild | None:
    _, n, max_rank = matrix.b.shape
    if not MIN_ROWS <= len(x) <= MAX_ROWS or not are_served(device, x, matrix, adapters):
        return None
    return adapted_build(len(x), n, max_rank, device.num_sms, device.max_shared_bytes - ROOM_BYTES)


def are_served(device: KernelLauncher, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> bool:
    """Return whether products with adapters take such operands, of any number of rows."""
    are_16_bits = device.dtype.itemsize == _FLOAT32.itemsize // 2
    are_whole = x.shape[1] % _EIGHT == 0 and all(end % _EIGHT == 0 for end in matrix.part_ends)
    return device.arch == "90a" and are_16_bits and adapters.tile_rows <= _TILE_ROWS and are_whole

"""Products of 33 to 64 rows on Hopper that multiply by the rows' adapters themselves: `adapted_product_sm90`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from model.ops.adapter_interface import AdapterMatrix, AdapterRows
from model.ops.gpu.adapters.fused import STEP_RANKS, are_served, most_stages
from model.ops.gpu.launcher import KernelLauncher
from model.ops.gpu.linear_builds import SmallMBuild
from model.ops.interface import Array

MIN_ROWS, MAX_ROWS = 33, 64
"""Rows served. H200: at 64 over 32 adapters of rank 16, a step of Llama-3.1-8B takes 1.18 times the base step."""

RINGS_BYTES = 64 << 10
"""Shared memory of a block's helpers, for A and then for B."""

_MAX_PARTS = 3
_MAX_UNIT_OUTPUTS = 48
_NUM_SPLITS = 4
_NUM_COUNTERS = 1024
_THREADS = 416
_MIN_STAGES = 3
_BARRIERS_BYTES = 800
_SPAN = 64  # elements of a swizzled row
_FLOAT32 = np.dtype(np.float32)
_UINT32 = np.dtype(np.uint32)


@dataclass(frozen=True, order=True)
class ProductBuild(SmallMBuild):
    """Macros of adapted_product_sm90.cu."""

    rank_steps: int

    @functools.cached_property
    def threads(self) -> int:
        return _THREADS

    @functools.cached_property
    def defines(self) -> dict[str, int]:
        return super().defines | {"RANK_STEPS": self.rank_steps, "RINGS_BYTES": RINGS_BYTES}

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Bytes of the product, and of the helpers' barriers, operands, sums, lists and rings."""
        operands = 64 * self.cols * self.rank_steps
        added = 4 * self.cols // self.split * (16 * math.ceil(self.rows / 16) + 4)
        return super().shared_bytes + _BARRIERS_BYTES + operands + added + 16 * self.cols + 1024 + RINGS_BYTES


@functools.cache
def product_build(m: int, n: int, max_rank: int, num_sms: int, max_shared_bytes: int) -> ProductBuild | None:
    """Return the build for `m` rows of x, `n` of weights and adapters of `max_rank`, or None."""
    return most_stages(ProductBuild, _MIN_STAGES, (m, n, max_rank), num_sms, max_shared_bytes)


class AdaptedProduct:
    """`AdapterOps.lora_linear` of x, dense weights and a bias."""

    def __init__(self, device: KernelLauncher):
        self._device = device
        self._num_launched = 0

    def __call__(
        self, operands: tuple[Array, Array, Array | None], matrix: AdapterMatrix, adapters: AdapterRows
    ) -> Array | None:
        device, (x, weight, bias), maps = self._device, operands, self._device.tensor_maps
        build = _build(device, x, matrix, adapters)
        if build is None:
            return None
        (num_rows, k), (num_slots, n, max_rank), num_sorted = x.shape, matrix.b.shape, len(adapters.rows)
        num_parts = len(matrix.part_ends)
        num_outputs, first_end, second_end = num_parts * max_rank, *(*matrix.part_ends, n, n)[: _MAX_PARTS - 1]
        unit_outputs = _unit_outputs(num_outputs)
        out = device.temporary((num_rows, n), device.dtype)
        counts = _NUM_SPLITS, num_sorted, len(adapters.tiles), num_parts, max_rank
        device.launch(
            "adapted_product_sm90",
            (build.num_blocks(n, device.num_sms),),
            (
                maps.get(x, (k, num_rows), (_SPAN, build.cols)),
                maps.get(weight, (k, n), (_SPAN, build.rows)),
                maps.get(matrix.a, (k, num_slots * num_outputs), (_SPAN, unit_outputs)),
                x,
                matrix.b,
                bias,
                out,
                device.temporary((_NUM_SPLITS, num_sorted, num_outputs), _FLOAT32),
                adapters.rows,
                adapters.tiles,
                matrix.ranks,
                self._next_counters(),
                *map(np.int32, (num_rows, n, k, *counts, first_end, second_end, unit_outputs)),
            ),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=True,
            **build.defines,
        )
        return out

    def _next_counters(self) -> Array:
        """Return uint32[2] of zeros: a product may start while the previous one still uses its own."""
        counters = self._device.zeros((_NUM_COUNTERS, 2), _UINT32)
        self._num_launched += 1
        return counters[self._num_launched % _NUM_COUNTERS]


def _unit_outputs(num_outputs: int) -> int:
    """Return the outputs of x @ A that a block sums at once."""
    parts = (num_outputs // count for count in range(1, num_outputs) if num_outputs % (STEP_RANKS * count) == 0)
    return next(part for part in parts if part <= _MAX_UNIT_OUTPUTS)


def _build(device: KernelLauncher, x: Array, matrix: AdapterMatrix, adapters: AdapterRows) -> ProductBuild | None:
    _, n, max_rank = matrix.b.shape
    if not MIN_ROWS <= len(x) <= MAX_ROWS or not are_served(device, x, matrix, adapters):
        return None
    return product_build(len(x), n, max_rank, device.num_sms, device.max_shared_bytes)

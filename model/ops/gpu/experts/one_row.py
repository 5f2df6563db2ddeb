"""Launches experts_row: norm, router, experts and sum of one row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from model.ops.gpu.experts.builds import MAX_EXPERTS
from model.ops.gpu.launcher import KernelLauncher, expect
from model.ops.interface import Array, Routing
from model.ops.weight import ExpertWeights, WeightFormat

MAX_WORDS = 1 << 15
"""Most words of 8 bytes through which the blocks of a launch exchange rows."""

_STAGES = 3
"""H200, a pass of one token of Qwen3-30B-A3B: 2,056 us; with four stages 2,083, five 2,104, six 2,134."""
_WARPS = 16
_WIDTH = 4096  # most elements of a row: one vector per thread
_SPAN, _STEP = 128, 64
_ROUND = _WARPS * _SPAN
_STATIC_BYTES = 8 << 10
_MAX_USED = 32  # experts per row
_TILE_ROWS, _GATED_ROWS = 16, 8
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)

Exchange = tuple[Array, Array]
"""Words uint64[MAX_WORDS] and launches uint32[SMs], 0 before the first launch; shared by all launches on a stream."""


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    inner: int
    num_experts: int
    num_used: int
    num_blocks: int

    @classmethod
    def of(cls, device: KernelLauncher, experts: ExpertWeights, routing: Routing) -> _Sizes:
        num_experts, hidden = experts.router.shape
        return cls(hidden, experts.down.shape[1], num_experts, routing.num_used, device.num_sms)

    @property
    def defines(self) -> dict[str, int]:
        sizes = {"HIDDEN": self.hidden, "INNER": self.inner, "NUM_EXPERTS": self.num_experts}
        return sizes | {"NUM_USED": self.num_used, "BLOCKS": self.num_blocks, "STAGES": _STAGES}

    @property
    def num_words(self) -> int:
        return max(self.num_experts, self.num_blocks) + 1 + self.num_used * self.inner // 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of the rings, the row, gated rows and sums."""
        spans = math.ceil(self.inner / _SPAN)
        ring, row = _WARPS * _STAGES * _TILE_ROWS * _STEP * 2, math.ceil(self.hidden / _ROUND) * _ROUND * 2
        gated = max(2 * self.num_used * spans * _SPAN, 16 * math.ceil(self.num_experts / 4))
        items = self.inner // _GATED_ROWS * self.num_used
        sums = math.ceil(items / self.num_blocks) + math.ceil(spans * self.num_used / _WARPS)
        return ring + row + gated + sums * _WARPS * _TILE_ROWS * 4

    def fits(self, device: KernelLauncher) -> bool:
        is_small = self.num_experts <= MAX_EXPERTS and self.hidden <= _WIDTH and self.num_words <= MAX_WORDS
        is_whole = self.hidden % _TILE_ROWS == 0 and self.inner % 8 == 0
        if not is_small or not is_whole or not 1 <= self.num_used <= min(_MAX_USED, self.num_experts):
            return False
        return self.shared_bytes <= device.max_shared_bytes - _STATIC_BYTES


def can_take_row(device: KernelLauncher, x: Array, experts: ExpertWeights, routing: Routing) -> bool:
    """Return whether experts_row supports this row and these sizes."""
    formats = {weight.format for weight in (experts.router, experts.gate_up, experts.down)}
    is_one = device.arch == "90a" and device.dtype != _FLOAT32 and len(x) == 1 and formats == {WeightFormat.DENSE}
    return is_one and _Sizes.of(device, experts, routing).fits(device)


def experts_of_row(
    device: KernelLauncher,
    sums: tuple[Array, Array],
    norm: tuple[Array, float],
    experts: ExpertWeights,
    routing: Routing,
    exchange: Exchange,
) -> Array:
    """Implement `Ops.add_norm_experts` where `can_take_row` is true; `sums` is (x, residual), `norm` (weight, eps)."""
    (x, residual), (weight, eps), dtype = sums, norm, device.dtype
    sizes = _Sizes.of(device, experts, routing)
    num_experts, hidden, inner = sizes.num_experts, sizes.hidden, sizes.inner
    matrices = experts.router.data, experts.gate_up.data, experts.down.data
    expect("x", x, dtype, 1, hidden)
    expect("residual", residual, dtype, 1, hidden)
    expect("weight", weight, dtype, hidden)
    expect("router", matrices[0], dtype, num_experts, hidden)
    expect("gate_up", matrices[1], dtype, num_experts, 2 * inner, hidden)
    expect("down", matrices[2], dtype, num_experts, hidden, inner)
    if routing.slots is not None:
        expect("slots", routing.slots, _INT64, 1)
    out = device.temporary((1, hidden), dtype)
    scalars = np.int32(routing.renormalise), np.int64(routing.num_slots), np.float32(eps)
    device.launch(
        "experts_row",
        (sizes.num_blocks,),
        (x, residual, weight, *matrices, routing.slots, out, *exchange, *scalars),
        threads=32 * _WARPS,
        shared_bytes=sizes.shared_bytes,
        overlaps=True,
        shared_percent=100,
        **sizes.defines,
    )
    return out

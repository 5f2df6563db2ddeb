"""Launches the kernels of one row through a layer of experts: experts_row and layer_row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from model.ops.gpu.experts.builds import MAX_EXPERTS
from model.ops.gpu.launcher import KernelLauncher, expect
from model.ops.interface import Array, LayerTail, Routing
from model.ops.weight import ExpertWeights, Weight, WeightFormat

MAX_WORDS = 1 << 15
"""Words of 8 bytes through which the blocks of a launch exchange rows."""

_STAGES = 2
_HOLD = 1  # of layer_row: stages of the next product that are fetched before the kernel before it ends
_WARPS = 16
_WIDTH = 4096  # of a row at most: a vector a thread
_SPAN = 128
_ROUND = _WARPS * _SPAN
_STATIC_BYTES = 8 << 10
_MAX_USED = 32  # of a row
_TILE_ROWS, _GATED_ROWS = 16, 8
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)

Exchange = tuple[Array, Array]
"""Words uint64[MAX_WORDS] and launches uint32[SMs], 0 before the first launch; of all launches on a stream."""


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a row's layer; `attended` and `width` are 0 without the products around the experts."""

    hidden: int
    inner: int
    num_experts: int
    num_used: int
    num_blocks: int
    attended: int = 0
    width: int = 0

    @classmethod
    def of(cls, device: KernelLauncher, experts: ExpertWeights, routing: Routing, *around: int) -> _Sizes:
        num_experts, hidden = experts.router.shape
        return cls(hidden, experts.down.shape[1], num_experts, routing.num_used, device.num_sms, *around)

    @property
    def defines(self) -> dict[str, int]:
        sizes = {"HIDDEN": self.hidden, "INNER": self.inner, "NUM_EXPERTS": self.num_experts}
        sizes |= {"NUM_USED": self.num_used, "BLOCKS": self.num_blocks, "STAGES": _STAGES}
        return sizes | {"ATTENDED": self.attended, "NEXT_SIZE": self.width, "HOLD": _HOLD} if self.width else sizes

    @property
    def num_words(self) -> int:
        return self.hidden + max(self.num_experts, self.num_blocks) + 1 + self.num_used * self.inner // 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of rings, held stages, the row, gated rows and sums."""
        stages = _STAGES + (_HOLD if self.width else 0)
        ring, row = _WARPS * stages * _TILE_ROWS * _SPAN * 2, math.ceil(self.hidden / _ROUND) * _ROUND * 2
        spans = math.ceil(self.inner / _SPAN)
        inputs = 2 * max(self.num_used * spans * _SPAN, math.ceil(self.attended / _ROUND) * _ROUND)
        tiles = self.hidden // _TILE_ROWS, self.inner // _GATED_ROWS * self.num_used, math.ceil(self.width / _TILE_ROWS)
        units = max(*(math.ceil(each / self.num_blocks) for each in tiles), math.ceil(spans * self.num_used / _WARPS))
        return ring + row + max(inputs, 16 * math.ceil(self.num_experts / 4)) + units * _WARPS * _TILE_ROWS * 4

    def fits(self, device: KernelLauncher) -> bool:
        is_small = self.num_experts <= MAX_EXPERTS and self.hidden <= _WIDTH and self.num_words <= MAX_WORDS
        is_whole = self.hidden % _TILE_ROWS == 0 and self.inner % 8 == 0 and self.attended % 8 == 0
        if not is_small or not is_whole or not 1 <= self.num_used <= min(_MAX_USED, self.num_experts):
            return False
        return self.shared_bytes <= device.max_shared_bytes - _STATIC_BYTES


def can_take_row(device: KernelLauncher, x: Array, experts: ExpertWeights, routing: Routing) -> bool:
    """Return whether experts_row takes this row and these sizes."""
    weights = experts.router, experts.gate_up, experts.down
    return len(x) == 1 and _takes(device, weights) and _Sizes.of(device, experts, routing).fits(device)


def can_take_tail(device: KernelLauncher, tail: LayerTail, routing: Routing) -> bool:
    """Return whether layer_row takes one row of these sizes."""
    experts = tail.experts
    weights = [tail.output, experts.router, experts.gate_up, experts.down]
    weights += [] if tail.product is None else [tail.product]
    return _takes(device, weights) and _sizes_of(device, tail, routing).fits(device)


def experts_of_row(
    device: KernelLauncher,
    sums: tuple[Array, Array],
    norm: tuple[Array, float],
    experts: ExpertWeights,
    routing: Routing,
    exchange: Exchange,
) -> Array:
    """`Ops.add_norm_experts`, where `can_take_row`; `sums`: x, residual; `norm`: weight, eps."""
    (x, residual), (weight, eps) = sums, norm
    sizes = _Sizes.of(device, experts, routing)
    _expect(device, sizes, experts, routing, {"x": x, "residual": residual}, {"weight": weight})
    out = device.temporary((1, sizes.hidden), device.dtype)
    inputs = x, residual, weight, *_data(experts), routing.slots
    _launch(device, "experts_row", sizes, (*inputs, out, *exchange), routing, eps)
    return out


def tail_of_row(
    device: KernelLauncher,
    x: Array,
    residual: Array,
    tail: LayerTail,
    routing: Routing,
    out: Array,
    exchange: Exchange,
) -> None:
    """`Ops.layer_tail`, where `can_take_tail`."""
    sizes, product, experts, dtype = _sizes_of(device, tail, routing), tail.product, tail.experts, device.dtype
    _expect(device, sizes, experts, routing, {"residual": residual}, {"norm": tail.norm, "next_norm": tail.next_norm})
    expect("x", x, dtype, 1, sizes.attended)
    expect("output", tail.output.data, dtype, sizes.hidden, sizes.attended)
    expect("out", out, dtype, 1, sizes.hidden if product is None else sizes.width)
    if product is not None:
        expect("product", product.data, dtype, sizes.width, sizes.hidden)
    for bias, width in ((tail.output_bias, sizes.hidden), (tail.product_bias, sizes.width)):
        if bias is not None:
            expect("bias", bias, dtype, width)
    inputs = x, tail.output.data, tail.output_bias, residual, tail.norm, *_data(experts), routing.slots, tail.next_norm
    following = (None, None) if product is None else (product.data, tail.product_bias)
    _launch(device, "layer_row", sizes, (*inputs, *following, out, *exchange), routing, tail.eps)


def _takes(device: KernelLauncher, weights: list[Weight] | tuple[Weight, ...]) -> bool:
    is_dense = all(weight.format is WeightFormat.DENSE and weight.input_order is None for weight in weights)
    return device.arch == "90a" and device.dtype != _FLOAT32 and is_dense


def _sizes_of(device: KernelLauncher, tail: LayerTail, routing: Routing) -> _Sizes:
    return _Sizes.of(device, tail.experts, routing, tail.output.shape[1], tail.width)


def _data(experts: ExpertWeights) -> tuple[Array, ...]:
    return experts.router.data, experts.gate_up.data, experts.down.data


def _expect(
    device: KernelLauncher,
    sizes: _Sizes,
    experts: ExpertWeights,
    routing: Routing,
    rows: dict[str, Array],
    norms: dict[str, Array],
) -> None:
    num_experts, hidden, inner = sizes.num_experts, sizes.hidden, sizes.inner
    matrices = (num_experts, hidden), (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    for name, array in rows.items():
        expect(name, array, device.dtype, 1, hidden)
    for name, array in norms.items():
        expect(name, array, device.dtype, hidden)
    for name, array, shape in zip(("router", "gate_up", "down"), _data(experts), matrices, strict=True):
        expect(name, array, device.dtype, *shape)
    if routing.slots is not None:
        expect("slots", routing.slots, _INT64, 1)


def _launch(
    device: KernelLauncher, name: str, sizes: _Sizes, arrays: tuple[Array | None, ...], routing: Routing, eps: float
) -> None:
    device.launch(
        name,
        (sizes.num_blocks,),
        (*arrays, np.int32(routing.renormalise), np.int64(routing.num_slots), np.float32(eps)),
        threads=32 * _WARPS,
        shared_bytes=sizes.shared_bytes,
        overlaps=True,
        **sizes.defines,
    )

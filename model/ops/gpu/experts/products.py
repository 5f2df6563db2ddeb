"""Launches the grouped products of experts. All sizes are host integers, so steps can be captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from model.ops.cpu.quantised import dequantise
from model.ops.gpu.device import THREADS, expect
from model.ops.gpu.experts.builds import (
    MAX_EXPERTS,
    MAX_REREAD_PAIRS,
    gemv_build,
    gemv_w4_build,
    gemv_w8_build,
    sm90_build,
    takes_sm90,
    w4_sm90_build,
)  # fmt: skip
from model.ops.gpu.int4.linear import layout_of
from model.ops.gpu.launcher import KernelLauncher
from model.ops.int4 import SPAN, SPAN_BYTES, TILE_ROWS
from model.ops.interface import Array, ExpertGroups, Fp8Rows
from model.ops.weight import Weight, WeightFormat

WIDENED_BYTES = 64 << 20
"""Memory for 16-bit copies of 8-bit experts, unless one expert is larger. Experts are multiplied one range after
another."""

_BLOCK = 128  # side of an FP8_BLOCK block
_DEQUANTISED = 16  # elements per thread of dequantise_rows.cu
_WARP = 32
_ALIGNMENT = 16
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_INT8, _UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
_BYTE_FORMATS = (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8)


@dataclass(frozen=True)
class _Call:
    """One grouped product."""

    device: KernelLauncher
    x: Array | Fp8Rows  # [T, K], or [P, K] of sorted pairs
    weight: Weight  # [E, N, K]
    groups: ExpertGroups
    is_sorted: bool
    out: Array  # [P, N]
    mean_pairs: float  # pairs per expert
    knows_groups: bool = False  # the previous launch has waited for `groups`

    @property
    def num_rows(self) -> int:
        return len(self.groups.places)

    @property
    def rows(self) -> Array | None:
        """Row of x of each pair, or None if x has a row per pair."""
        return None if self.is_sorted else self.groups.rows

    @property
    def sizes(self) -> tuple[np.int32, ...]:
        return tuple(map(np.int32, (len(self.weight.data), *self.weight.shape)))

    def num_blocks(self, tile_rows: int, most: int) -> int:
        """Return the grid for tiles of `tile_rows` weight rows, of at most `most` blocks."""
        return min(len(self.out) * math.ceil(self.weight.shape[0] / tile_rows), most)

    def sorted_x(self) -> Array | Fp8Rows:
        return self.x if self.is_sorted else _sorted(self.device, self.x, self.groups.rows)


def experts_linear(
    device: KernelLauncher,
    x: Array | Fp8Rows,
    weight: Weight,
    groups: ExpertGroups,
    is_sorted: bool,
    knows_groups: bool = False,
) -> Array:
    """Implement `Ops.experts_linear`. `knows_groups`: the previous launch is a gated product, which lets the next
    kernel start only once `groups` are written."""
    num_pairs = len(groups.rows)
    expect_operands(device, x, weight, groups, num_pairs if is_sorted else len(groups.places))
    out = device.temporary((num_pairs, weight.shape[0]), device.dtype)
    if num_pairs == 0:
        return out
    call = _Call(device, x, weight, groups, is_sorted, out, num_pairs / len(weight.data), knows_groups)
    is_many = takes_sm90(call.num_rows, call.mean_pairs, weight.format is WeightFormat.DENSE)
    if device.arch != "90a" or not is_many or not _multiply_many(call):
        _multiply_few(call)
    return out


def pack_stack(weight: Weight, pack: Callable[[Weight], Weight]) -> Weight:
    """Return a stack of INT4 as INT4_TILED, in the same memory, by `pack` of each matrix."""
    packed, *_ = [pack(weight.expert(index)) for index in range(len(weight.data))]

    def stacked(array: Array | None, one: Array | None) -> Array | None:
        return None if array is None or one is None else array.reshape(len(weight.data), *one.shape)

    return replace(
        packed,
        data=stacked(weight.data, packed.data),
        scale=stacked(weight.scale, packed.scale),
        zero_point=stacked(weight.zero_point, packed.zero_point),
    )


def dequantised_stack(weight: Weight, dtype: np.dtype) -> np.ndarray:
    """Return a stack dequantised on the host, [E, N, K]."""
    num_experts = len(weight.data)
    values = np.empty((num_experts, *weight.shape), dtype)
    for expert in range(num_experts):
        values[expert] = dequantise(weight.expert(expert))
    return values


def expect_operands(
    device: KernelLauncher, x: Array | Fp8Rows, weight: Weight, groups: ExpertGroups, num_rows: int
) -> None:
    """Raise ValueError for operands that no kernel supports."""
    (n, k), num_experts, num_pairs = weight.shape, len(weight.data), len(groups.rows)
    if device.dtype == _FLOAT32 or k % (16 if weight.format in _BYTE_FORMATS else 8) or num_experts > MAX_EXPERTS:
        problem = f"[{num_experts}, {n}, {k}] in {device.dtype.name}"
        raise ValueError(f"experts_linear: {problem} is not supported (16-bit types, K a multiple of 16)")
    _expect_weight(device, weight)
    data = x.data if isinstance(x, Fp8Rows) else x
    if (data.data.ptr | weight.data.data.ptr) % _ALIGNMENT:
        raise ValueError("experts_linear: x or weight is not aligned to 16 bytes")
    expect("offsets", groups.offsets, _INT32, num_experts + 1)
    expect("rows", groups.rows, _INT32, num_pairs)
    if not isinstance(x, Fp8Rows):
        expect("x", x, device.dtype, num_rows, k)
        return
    if weight.format is not WeightFormat.FP8:
        raise ValueError(f"experts_linear: x in e4m3 and weights in {weight.format} do not go together (fp8)")
    expect("x.data", x.data, _UINT8, num_rows, k)
    expect("x.scale", x.scale, _FLOAT32, num_rows)


def _expect_weight(device: KernelLauncher, weight: Weight) -> None:
    (n, k), num_experts, scale = weight.shape, len(weight.data), weight.scale
    if weight.format is WeightFormat.DENSE:
        expect("weight.data", weight.data, device.dtype, num_experts, n, k)
    elif weight.format is WeightFormat.INT4_TILED and scale is not None:
        expect("weight.data", weight.data, _UINT8, num_experts, k // SPAN, n // TILE_ROWS, SPAN_BYTES)
        expect("weight.scale", scale, scale.dtype, num_experts, k // weight.group_size, n // TILE_ROWS, TILE_ROWS)
        if weight.zero_point is not None:
            expect("weight.zero_point", weight.zero_point, _UINT8, *scale.shape)
    elif weight.format in _BYTE_FORMATS:
        expect("weight.data", weight.data, _INT8 if weight.format is WeightFormat.INT8 else _UINT8, num_experts, n, k)
        blocks = (math.ceil(n / _BLOCK), math.ceil(k / _BLOCK))
        expect("weight.scale", scale, _FLOAT32, num_experts, *(blocks if _has_blocks(weight) else (n,)))
    else:
        known = "dense, fp8, fp8-block, int8, int4-tiled"
        raise ValueError(f"experts_linear: weights in {weight.format} are not supported ({known})")


def _has_blocks(weight: Weight) -> bool:
    return weight.format is WeightFormat.FP8_BLOCK


def _multiply_few(call: _Call) -> None:
    if call.weight.format is WeightFormat.DENSE:
        _launch_gemv(call)
    elif call.weight.format is WeightFormat.INT4_TILED:
        _launch_gemv_w4(call)
    else:
        _launch_gemv_w8(call)


def _multiply_many(call: _Call) -> bool:
    if call.weight.format is WeightFormat.INT4_TILED:
        return _launch_w4_sm90(call)
    if call.weight.format is WeightFormat.DENSE or isinstance(call.x, Fp8Rows):
        return _launch_sm90(call)
    return call.mean_pairs > MAX_REREAD_PAIRS and _launch_widened(call)


def _launch_gemv(call: _Call) -> None:
    device, build = call.device, gemv_build(call.num_rows, call.mean_pairs)
    device.launch(
        "experts_gemv",
        (call.num_blocks(16 * build.row_tiles, build.blocks_per_sm * device.num_sms),),
        (call.x, call.rows, call.weight.data, call.groups.offsets, call.out, *call.sizes),
        threads=_WARP * build.warps,
        shared_bytes=build.shared_bytes + 4 * len(call.weight.data),
        overlaps=True,
        OUT_FLOAT=0,
        GATED=0,
        KNOWN=int(call.knows_groups),
        **build.defines,
    )


def _launch_gemv_w8(call: _Call) -> None:
    device, build = call.device, gemv_w8_build(call.num_rows, call.mean_pairs)
    x_args = (call.x.data, call.x.scale) if isinstance(call.x, Fp8Rows) else (call.x, None)
    weight = call.weight
    device.launch(
        "experts_gemv_w8",
        (call.num_blocks(16 * build.row_tiles, build.blocks_per_sm * device.num_sms),),
        (*x_args, call.rows, weight.data, weight.scale, call.groups.offsets, call.out, *call.sizes),
        threads=_WARP * build.warps,
        shared_bytes=build.shared_bytes + 4 * len(weight.data),
        overlaps=True,
        OUT_FLOAT=0,
        X_FP8=int(isinstance(call.x, Fp8Rows)),
        WEIGHT_INT8=int(weight.format is WeightFormat.INT8),
        BLOCK_SCALES=int(_has_blocks(weight)),
        GATED=0,
        KNOWN=0,
        **build.defines,
    )


def _launch_gemv_w4(call: _Call) -> None:
    device, weight, layout = call.device, call.weight, layout_of(call.weight)
    build = gemv_w4_build(call.num_rows, call.mean_pairs)
    device.launch(
        "experts_gemv_w4a16",
        (call.num_blocks(TILE_ROWS * build.row_tiles, build.blocks_per_sm * device.num_sms),),
        (call.x, call.rows, *_arrays(weight), call.groups.offsets, call.out, *call.sizes, _group_spans(weight)),
        threads=_WARP * build.warps,
        shared_bytes=build.shared_bytes(layout) + 4 * len(weight.data),
        overlaps=True,
        **build.defines(layout),
    )


def _launch_w4_sm90(call: _Call) -> bool:
    device, weight = call.device, call.weight
    build = w4_sm90_build(call.mean_pairs, layout_of(weight), device.max_shared_bytes)
    if build is None:
        return False
    x = call.sorted_x()
    x_map = device.tensor_maps.get(x, (weight.shape[1], len(call.out)), (64, build.cols))
    device.launch(
        "experts_w4a16_sm90",
        (call.num_blocks(TILE_ROWS * build.blocks, device.num_sms),),
        (x_map, *_arrays(weight), call.groups.offsets, call.out, *call.sizes, _group_spans(weight)),
        threads=build.threads,
        shared_bytes=build.shared_bytes,
        overlaps=True,
        OUT_FLOAT=0,
        **build.defines,
    )
    return True


def _arrays(weight: Weight) -> tuple[Array | None, ...]:
    return weight.data, weight.scale, weight.zero_point


def _group_spans(weight: Weight) -> np.int32:
    return np.int32(max(1, weight.group_size // SPAN))


def _launch_widened(call: _Call) -> bool:
    """Multiply by 16-bit copies of the experts, one range after another; return whether this is possible."""
    device, weight, x = call.device, call.weight, call.sorted_x()
    num_experts, (n, k) = len(weight.data), weight.shape
    of_range = max(1, WIDENED_BYTES // (n * k * device.dtype.itemsize))
    if sm90_build(call.mean_pairs, False, device.max_shared_bytes) is None or isinstance(x, Fp8Rows):
        return False
    widened = device.temporary((min(of_range, num_experts), n, k), device.dtype)
    for first in range(0, num_experts, of_range):
        last = min(first + of_range, num_experts)
        _widen(device, weight, first, last, widened)
        groups = replace(call.groups, offsets=call.groups.offsets[first : last + 1])
        _launch_sm90(replace(call, x=x, weight=Weight(widened[: last - first]), groups=groups, is_sorted=True))
    return True


def _widen(device: KernelLauncher, weight: Weight, first: int, last: int, out: Array) -> None:
    """Dequantise experts first..last - 1 to `out`, one by one if scale blocks straddle them."""
    n, k = weight.shape
    step = 1 if _has_blocks(weight) and n % _BLOCK else last - first
    for begin in range(first, last, step):
        own = slice(begin, begin + step)
        args = (weight.data[own], _scale(weight)[own], out[begin - first : begin - first + step], np.int32(k))
        device.launch(
            "dequantise_rows",
            (step * n, math.ceil(k / (THREADS * _DEQUANTISED))),
            args,
            overlaps=True,
            WEIGHT_INT8=int(weight.format is WeightFormat.INT8),
            BLOCK_SCALES=int(_has_blocks(weight)),
        )


def _scale(weight: Weight) -> Array:
    return weight.scale


def _launch_sm90(call: _Call) -> bool:
    device, weight, out = call.device, call.weight, call.out
    is_fp8 = isinstance(call.x, Fp8Rows)
    build = sm90_build(call.mean_pairs, is_fp8, device.max_shared_bytes)
    if build is None:
        return False
    x, (num_experts, n, k) = call.sorted_x(), weight.data.shape
    data, x_scale = (x.data, x.scale) if isinstance(x, Fp8Rows) else (x, None)
    width = k // 2 if is_fp8 else k  # 16-bit elements
    x_map = device.tensor_maps.get(data, (width, len(out)), (64, build.cols))
    weight_map = device.tensor_maps.get(weight.data, (width, num_experts * n), (64, build.rows))
    device.launch(
        "experts_sm90",
        (call.num_blocks(build.rows, device.num_sms),),
        (x_map, weight_map, x_scale, weight.scale, call.groups.offsets, out, *call.sizes),
        threads=build.threads,
        shared_bytes=build.shared_bytes,
        overlaps=True,
        OUT_FLOAT=0,
        X_FP8=int(is_fp8),
        **build.defines,
    )
    return True


def _sorted(device: KernelLauncher, x: Array | Fp8Rows, rows: Array) -> Array | Fp8Rows:
    """Return the row of x of each sorted pair."""
    if not isinstance(x, Fp8Rows):
        return _gathered(device, x, rows, device.dtype_code)
    data = _gathered(device, x.data.view(device.dtype), rows, device.dtype_code)  # two e4m3 per element
    scale = _gathered(device, x.scale.reshape(-1, 1), rows, 0)
    return Fp8Rows(data.view(_UINT8), scale.reshape(-1))


def _gathered(device: KernelLauncher, table: Array, rows: Array, dtype_code: int) -> Array:
    num_rows, width = table.shape
    out = device.temporary((len(rows), width), table.dtype)
    args = (table, rows, out, np.int32(num_rows), np.int32(width))
    device.launch("gather_rows", (len(rows),), args, overlaps=True, QUIRE_DTYPE=dtype_code)
    return out

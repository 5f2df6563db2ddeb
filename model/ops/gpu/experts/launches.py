"""Launches the kernels of experts. All sizes are host integers, so a step can be captured."""

from __future__ import annotations

import math

import numpy as np

from model.ops.cpu.quantised import dequantise
from model.ops.gpu.device import expect
from model.ops.gpu.experts.builds import MAX_EXPERTS, gemv_build, gemv_w8_build, sm90_build, takes_sm90
from model.ops.gpu.launcher import KernelLauncher
from model.ops.gpu.linear_builds import SmallMBuild
from model.ops.gpu.w8.builds import SmallMW8Build
from model.ops.interface import Array, ExpertGroups, Fp8Rows
from model.ops.weight import Weight, WeightFormat

_BLOCK = 128  # side of an FP8_BLOCK block
_GROUP_WARPS = 16  # WARPS of group_by_expert.cu
_ROUTED_ROWS = 8  # of a block of route_experts.cu
_WARP = 32
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
_INT8, _UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
_BYTE_FORMATS = (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.INT8)


def route_experts(
    device: KernelLauncher, logits: Array, how: tuple[int, bool], slots: Array | None, num_slots: int
) -> tuple[Array, Array]:
    """`Ops.route_experts`; `how`: num_used, renormalise."""
    expect("logits", logits, _FLOAT32, None, None)
    (num_rows, num_experts), (num_used, renormalise) = logits.shape, how
    if slots is not None:
        expect("slots", slots, _INT64, num_rows)
    if not 1 <= num_used <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"route_experts: {num_used} of {num_experts} experts is not supported (1..{MAX_EXPERTS})")
    ids, weights = (device.temporary((num_rows, num_used), dtype) for dtype in (_INT32, _FLOAT32))
    sizes = map(np.int32, (num_rows, num_experts, num_used, renormalise))
    grid = (math.ceil(num_rows / _ROUTED_ROWS),)
    args = (logits, slots, ids, weights, *sizes, np.int64(num_slots))
    device.launch("route_experts", grid, args, overlaps=True, PER_LANE=math.ceil(num_experts / _WARP))
    return ids, weights


def group_by_expert(device: KernelLauncher, ids: Array, num_experts: int) -> ExpertGroups:
    """`Ops.group_by_expert`."""
    expect("ids", ids, _INT32, None, None)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"group_by_expert: {num_experts} experts are not supported (1..{MAX_EXPERTS})")
    num_pairs = ids.size
    rows, places = device.temporary((num_pairs,), _INT32), device.temporary(ids.shape, _INT32)
    offsets = device.temporary((num_experts + 1,), _INT32)
    args = (ids, rows, places, offsets, *map(np.int32, (num_pairs, num_experts, ids.shape[1])))
    shared_bytes = 4 * _GROUP_WARPS * num_experts
    device.launch("group_by_expert", (1,), args, threads=_WARP * _GROUP_WARPS, shared_bytes=shared_bytes, overlaps=True)
    return ExpertGroups(rows, places, offsets)


def experts_linear(
    device: KernelLauncher, x: Array | Fp8Rows, weight: Weight, groups: ExpertGroups, is_sorted: bool
) -> Array:
    """`Ops.experts_linear`."""
    (n, k), num_rows = weight.shape, len(groups.places)
    num_pairs, num_experts = len(groups.rows), len(weight.data)
    _expect_operands(device, x, weight, groups, num_pairs if is_sorted else num_rows)
    out = device.temporary((num_pairs, n), device.dtype)
    if num_pairs == 0:
        return out
    data = x.data if isinstance(x, Fp8Rows) else x
    if (data.data.ptr | weight.data.data.ptr | out.data.ptr) % 16:
        raise ValueError("experts_linear: x or weight is not aligned to 16 bytes")
    mean_pairs = num_pairs / num_experts
    is_native = weight.format is WeightFormat.DENSE or isinstance(x, Fp8Rows)
    if device.arch == "90a" and is_native and takes_sm90(num_rows, mean_pairs):
        build = sm90_build(mean_pairs, isinstance(x, Fp8Rows), device.max_shared_bytes)
        if build is not None:
            sorted_x = x if is_sorted else _sorted(device, x, groups.rows)
            _launch_sm90(device, build, sorted_x, weight, groups, out)
            return out
    rows = None if is_sorted else groups.rows
    sizes = tuple(map(np.int32, (num_experts, n, k)))
    if weight.format is WeightFormat.DENSE:
        dense = gemv_build(num_rows, mean_pairs)
        tiles = num_pairs * math.ceil(n / (16 * dense.row_tiles))
        device.launch(
            "experts_gemv",
            (min(tiles, dense.blocks_per_sm * device.num_sms),),
            (x, rows, weight.data, groups.offsets, out, *sizes),
            threads=_WARP * dense.warps,
            shared_bytes=dense.shared_bytes + 4 * num_experts,
            overlaps=True,
            OUT_FLOAT=0,
            **dense.defines,
        )
        return out
    w8 = gemv_w8_build(num_rows, mean_pairs)
    x_args = (x.data, x.scale) if isinstance(x, Fp8Rows) else (x, None)
    device.launch(
        "experts_gemv_w8",
        (min(num_pairs * math.ceil(n / (16 * w8.row_tiles)), w8.blocks_per_sm * device.num_sms),),
        (*x_args, rows, weight.data, weight.scale, groups.offsets, out, *sizes),
        threads=_WARP * w8.warps,
        shared_bytes=w8.shared_bytes + 4 * num_experts,
        overlaps=True,
        OUT_FLOAT=0,
        X_FP8=int(isinstance(x, Fp8Rows)),
        WEIGHT_INT8=int(weight.format is WeightFormat.INT8),
        BLOCK_SCALES=int(weight.format is WeightFormat.FP8_BLOCK),
        **w8.defines,
    )
    return out


def combine_experts(device: KernelLauncher, x: Array, groups: ExpertGroups, weights: Array) -> Array:
    """`Ops.combine_experts`."""
    num_rows, num_used = groups.places.shape
    width = x.shape[1]
    expect("x", x, device.dtype, num_rows * num_used, width)
    expect("places", groups.places, _INT32, num_rows, num_used)
    expect("weights", weights, _FLOAT32, num_rows, num_used)
    out = device.temporary((num_rows, width), device.dtype)
    args = (x, groups.places, weights, out, np.int32(num_used), np.int32(width))
    device.launch("combine_experts", (num_rows,), args, overlaps=True)
    return out


def dequantised_stack(weight: Weight, dtype: np.dtype) -> np.ndarray:
    """Return [E, N, K] of a stack on the host."""
    num_experts = len(weight.data)
    values = np.empty((num_experts, *weight.shape), dtype)
    for expert in range(num_experts):
        values[expert] = dequantise(weight.expert(expert))
    return values


def _expect_operands(
    device: KernelLauncher, x: Array | Fp8Rows, weight: Weight, groups: ExpertGroups, num_rows: int
) -> None:
    (n, k), num_experts, num_pairs = weight.shape, len(weight.data), len(groups.rows)
    is_byte = weight.format in _BYTE_FORMATS
    if weight.format is not WeightFormat.DENSE and not is_byte:
        raise ValueError(f"experts_linear: weights in {weight.format} are not supported (dense, fp8, fp8-block, int8)")
    if device.dtype == _FLOAT32 or k % (16 if is_byte else 8) or num_experts > MAX_EXPERTS:
        problem = f"[{num_experts}, {n}, {k}] in {device.dtype.name}"
        raise ValueError(f"experts_linear: {problem} is not supported (16-bit types, K a multiple of 16)")
    dtype = _INT8 if weight.format is WeightFormat.INT8 else _UINT8 if is_byte else device.dtype
    expect("weight.data", weight.data, dtype, num_experts, n, k)
    if weight.format is WeightFormat.FP8_BLOCK:
        expect("weight.scale", weight.scale, _FLOAT32, num_experts, math.ceil(n / _BLOCK), math.ceil(k / _BLOCK))
    elif is_byte:
        expect("weight.scale", weight.scale, _FLOAT32, num_experts, n)
    expect("offsets", groups.offsets, _INT32, num_experts + 1)
    expect("rows", groups.rows, _INT32, num_pairs)
    if not isinstance(x, Fp8Rows):
        expect("x", x, device.dtype, num_rows, k)
        return
    if weight.format is not WeightFormat.FP8:
        raise ValueError(f"experts_linear: x in e4m3 and weights in {weight.format} do not go together (fp8)")
    expect("x.data", x.data, _UINT8, num_rows, k)
    expect("x.scale", x.scale, _FLOAT32, num_rows)


def _launch_sm90(
    device: KernelLauncher,
    build: SmallMBuild | SmallMW8Build,
    x: Array | Fp8Rows,
    weight: Weight,
    groups: ExpertGroups,
    out: Array,
) -> None:
    num_experts, n, k = weight.data.shape
    is_fp8 = isinstance(x, Fp8Rows)
    data, x_scale, weight_scale = (x.data, x.scale, weight.scale) if isinstance(x, Fp8Rows) else (x, None, None)
    width = k // 2 if is_fp8 else k  # 16-bit elements
    x_map = device.tensor_maps.get(data, (width, len(out)), (64, build.cols))
    weight_map = device.tensor_maps.get(weight.data, (width, num_experts * n), (64, build.rows))
    sizes = map(np.int32, (num_experts, n, k))
    device.launch(
        "experts_sm90",
        (min(len(out) * math.ceil(n / build.rows), device.num_sms),),
        (x_map, weight_map, x_scale, weight_scale, groups.offsets, out, *sizes),
        threads=build.threads,
        shared_bytes=build.shared_bytes,
        overlaps=True,
        OUT_FLOAT=0,
        X_FP8=int(is_fp8),
        **build.defines,
    )


def _sorted(device: KernelLauncher, x: Array | Fp8Rows, rows: Array) -> Array | Fp8Rows:
    """Return the row of x of each sorted pair."""
    if not isinstance(x, Fp8Rows):
        return _gathered(device, x, rows, device.dtype_code)
    data = _gathered(device, x.data.view(device.dtype), rows, device.dtype_code)  # two e4m3 an element
    scale = _gathered(device, x.scale.reshape(-1, 1), rows, 0)
    return Fp8Rows(data.view(_UINT8), scale.reshape(-1))


def _gathered(device: KernelLauncher, table: Array, rows: Array, dtype_code: int) -> Array:
    num_rows, width = table.shape
    out = device.temporary((len(rows), width), table.dtype)
    args = (table, rows, out, np.int32(num_rows), np.int32(width))
    device.launch("gather_rows", (len(rows),), args, overlaps=True, QUIRE_DTYPE=dtype_code)
    return out

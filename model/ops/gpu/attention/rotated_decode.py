"""Launches rope_paged_decode, which rotates, writes the cache and attends for a few decodes in one kernel."""

from __future__ import annotations

import math

import numpy as np

from model.ops.gpu.attention.paged import (
    decode_tiles,
    is_e4m3,
    kv_build,
    plan_decode_attention,
    scale_log2,
    split_decode,
)
from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array, AttentionBatch, HeadRotation

_FP32 = 0
_MAX_ROWS, _MIN_FP8_ROWS, _MAX_GROUP, _MAX_GROUP_ALONE = 16, 8, 4, 8
"""Rows, and query heads per KV head, for which one kernel is faster (H200, heads of Llama-3.1-8B and Qwen3-30B-A3B);
with an e4m3 cache, one row as well. With 8 heads, only one row and a 16-bit cache: others were timed at one context."""

_PADDING = 8
"""16-bit elements between rotated queries in shared memory."""

_ALIGNMENT = 1024
"""Alignment of the tiles, which follow the queries."""


def can_rotate(device: KernelLauncher, qkv: Array, batch: AttentionBatch) -> bool:
    """Return whether one kernel can serve the rows: their blocks run at once and fit in shared memory."""
    if batch.exact or batch.drafted or device.dtype_code == _FP32 or len(qkv) == 0:
        return False
    num_kv_heads, head_dim = batch.kv.shape[3], batch.kv.shape[5]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    tiles = decode_tiles(device.dtype_code, batch.kv, group, is_alone=is_alone(batch))
    num_rows = tiles["MEMBERS"] * min(group, 16)
    static_bytes = 2 * num_rows * (head_dim + _PADDING) + 2 * head_dim * batch.kv.dtype.itemsize
    num_ctas = num_kv_heads * math.ceil(group / min(group, 16))
    aligned_bytes = (math.ceil(static_bytes / _ALIGNMENT) + 1) * _ALIGNMENT  # plus reductions
    fits = bool(tiles["SHARED_BYTES"] + aligned_bytes <= device.max_shared_bytes)
    # blocks that wait for others at once
    most_waiting = num_heads + 1 if is_alone(batch) else len(qkv) * num_ctas
    return fits and num_heads % num_kv_heads == 0 and most_waiting <= device.num_sms


def is_alone(batch: AttentionBatch) -> bool:
    """Return whether the kernel is built for one sequence with a 16-bit cache."""
    return len(batch.context_lens) == 1 and not is_e4m3(batch.kv)


def should_rotate(device: KernelLauncher, qkv: Array, batch: AttentionBatch) -> bool:
    """Return whether one kernel is possible and faster."""
    rows = len(qkv)
    pays = rows == 1 or rows >= _MIN_FP8_ROWS or not is_e4m3(batch.kv)
    num_kv_heads, head_dim = batch.kv.shape[3], batch.kv.shape[5]
    most_heads = _MAX_GROUP_ALONE if is_alone(batch) else _MAX_GROUP
    few = qkv.shape[1] <= (most_heads + 2) * num_kv_heads * head_dim
    return few and pays and rows <= _MAX_ROWS and can_rotate(device, qkv, batch)


def rotate_and_decode(
    device: KernelLauncher,
    qkv: Array,
    rotation: HeadRotation,
    at: tuple[Array, Array],
    batch: AttentionBatch,
) -> Array:
    """Implement `Ops.rope_decode_attention`. Launches must not overlap, because they share a workspace.

    The kernel reads the plan before its predecessor ends, so that must not be the planning kernel.
    """
    kv, tables, num_rows = batch.kv, batch.block_tables, len(qkv)
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    plan = plan_decode_attention(device, num_heads, batch) if batch.plan is None else batch.plan
    split = split_decode(device, num_heads, batch)
    num_partials = max(1, split.num_rows) * num_heads
    sent = (
        device.zeros((num_partials, head_dim), np.float32),
        device.zeros((num_partials, 2), np.float32),
    )
    partial: tuple[Array | None, ...] = None, None
    if is_alone(batch):
        partial = tuple(device.temporary((num_partials, n), np.float32) for n in (head_dim, 2))
    out = device.temporary((num_rows, num_heads * head_dim), device.dtype)
    tiles = decode_tiles(device.dtype_code, kv, num_heads // num_kv_heads, is_alone=is_alone(batch))
    rotated = (qkv, rotation.cos, rotation.sin, *at, rotation.q_norm, rotation.k_norm)
    sizes = (num_rows, num_blocks, num_layers, batch.layer, tables.shape[1], len(rotation.cos))
    numbers = (*map(np.int32, sizes), scale_log2(batch.scale), np.float32(rotation.eps))
    device.launch(
        "rope_paged_decode",
        (split.num_ctas, split.num_slots),
        (out, *rotated, kv, tables, plan, *sent, *partial, *numbers, batch.kv_scales),
        threads=32 * tiles["WARPS"],
        shared_bytes=tiles["SHARED_BYTES"],
        overlaps=batch.plan is not None,
        shared_percent=100 if is_alone(batch) else 0,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GROUP=num_heads // num_kv_heads,
        **tiles,
        **kv_build(kv),
    )
    return out

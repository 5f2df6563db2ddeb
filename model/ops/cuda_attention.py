"""Launches the paged attention kernels: tile sizes by shape, grids by what the host knows, workspace from the arena.

Nothing here looks at device data, so both launches can be captured in a graph. Tile sizes are chosen here alone; the
kernels check at compile time that they agree on the shared memory that follows from them. No choice needs more than the
99 KiB a block that sm_86, sm_89 and sm_120 have.

`ops` is the `CudaOps` in hand; of it, `kernels`, `stream`, `temporary`, `num_sms` and `dtype_code` are used.
"""

from __future__ import annotations

import math

import numpy as np

from model.ops.interface import Array

_FP32 = 0
"""`dtype_code` of the kernels that run on the CUDA cores and take a query row a warp or block."""

_DECODE_CTAS_PER_SM = 2
"""How many decode blocks an SM of an H100 holds at once (96 KiB of tiles each): splits aim at one full wave."""

_MIN_PART_TOKENS = 128
"""A shorter part of a sequence costs more in the merge than it saves."""

_MAX_SPLITS = 256

_DECODE_STAGES = 3
_DECODE_FP32_SHARED_BYTES = 8 << 10


def decode_attention(ops, q: Array, kv: Array, layer: int, block_tables: Array, context_lens: Array, scale: float,
                     window: int, out: Array) -> None:
    """`Ops.paged_decode_attention`. Decode launches of one device must not overlap: they share counters."""
    num_sequences, num_heads, head_dim = q.shape
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = kv.shape
    if num_sequences == 0:
        return
    group = num_heads // num_kv_heads
    rows = 1 if ops.dtype_code == _FP32 else min(group, 16)
    num_ctas = num_kv_heads * math.ceil(group / rows)
    num_splits = _num_splits(ops.num_sms, num_sequences * num_ctas, min(block_tables.shape[1] * block_size, window))
    num_partials = num_sequences * num_heads * num_splits if num_splits > 1 else 0
    partial_sums = ops.temporary((num_partials, head_dim), np.float32)
    partial_stats = ops.temporary((num_partials, 2), np.float32)

    warps = 4 if head_dim <= 128 else 2
    shared_bytes = (_DECODE_FP32_SHARED_BYTES if ops.dtype_code == _FP32
                    else warps * _DECODE_STAGES * 2 * 16 * _shared_row_bytes(head_dim))
    kernel = ops.kernels.get(
        "paged_decode_attention", shared_bytes=shared_bytes, QUIRE_DTYPE=ops.dtype_code, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, GROUP=group, WARPS=warps, STAGES=_DECODE_STAGES, MIN_PART=_MIN_PART_TOKENS,
        MAX_SPLITS=_MAX_SPLITS, SHARED_BYTES=shared_bytes,
    )
    args = (out, q, kv, block_tables, context_lens, partial_sums, partial_stats, np.int32(num_blocks),
            np.int32(num_layers), np.int32(layer), np.int32(block_tables.shape[1]), _scale_log2(scale),
            np.int32(window))
    kernel((num_ctas, num_splits, num_sequences), (32 * warps, 1, 1), args, shared_bytes, ops.stream)


def prefill_attention(ops, q: Array, kv: Array, layer: int, block_tables: Array, context_lens: Array,
                      query_start: Array, max_query_len: int, scale: float, window: int, out: Array) -> None:
    """`Ops.paged_prefill_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = kv.shape
    num_sequences = len(context_lens)
    if num_tokens == 0 or max_query_len == 0:
        return
    group = num_heads // num_kv_heads
    max_rows = max_query_len * group
    warps, row_tiles, keys = 4, 2 if head_dim <= 128 and max_rows > 64 else 1, 64 if head_dim <= 128 else 32
    rows = 16 * warps * (1 if ops.dtype_code == _FP32 else row_tiles)
    shared_bytes = 0 if ops.dtype_code == _FP32 else (rows + 4 * keys) * _shared_row_bytes(head_dim) + 128
    kernel = ops.kernels.get(
        "paged_prefill_attention", shared_bytes=shared_bytes, QUIRE_DTYPE=ops.dtype_code, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, GROUP=group, WARPS=warps, ROW_TILES=row_tiles, KEYS=keys, SHARED_BYTES=shared_bytes,
    )
    args = (out, q, kv, block_tables, context_lens, query_start, np.int32(num_blocks), np.int32(num_layers),
            np.int32(layer), np.int32(block_tables.shape[1]), _scale_log2(scale), np.int32(window))
    grid = (num_kv_heads, num_sequences, math.ceil(max_rows / rows))
    kernel(grid, (32 * warps, 1, 1), args, shared_bytes, ops.stream)


def _num_splits(num_sms: int, num_pairs: int, visible_tokens: int) -> int:
    """Into how many parts a sequence may be cut at most: enough to fill the device, none of them too short."""
    to_fill = math.ceil(_DECODE_CTAS_PER_SM * num_sms / num_pairs)
    return max(1, min(to_fill, math.ceil(visible_tokens / _MIN_PART_TOKENS), _MAX_SPLITS))


def _shared_row_bytes(head_dim: int) -> int:
    """Bytes between rows of 16-bit elements in shared memory, as `SharedTile` of attention.cuh lays them."""
    chunks = head_dim // 8
    is_swizzled = chunks >= 8 and chunks & (chunks - 1) == 0
    return 16 * (chunks if is_swizzled else chunks | 1)


def _scale_log2(scale: float) -> np.float32:
    """Scores are kept in units of log2, so that a weight is one exp2."""
    return np.float32(scale * math.log2(math.e))

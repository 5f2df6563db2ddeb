"""The paged KV cache: one array; a block is contiguous over all layers."""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig
from model.ops.interface import Array, Ops


def block_shape(config: ModelConfig, block_size: int) -> tuple[int, ...]:
    """Return [L, 2 (keys, values), Hkv, B, D]."""
    return config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim


def block_bytes(config: ModelConfig, block_size: int, dtype: np.dtype) -> int:
    return int(np.prod(block_shape(config, block_size))) * np.dtype(dtype).itemsize


def allocate_with_draft(
    ops: Ops, config: ModelConfig, num_blocks: int, block_size: int, draft_shape: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """Return whole blocks uint8[num_blocks, bytes], and in them the cache and the drafter's, [num_blocks,
    *draft_shape] in `ops.dtype`: copies and swaps of blocks move both. For the CPU: rows are strided."""
    shape = block_shape(config, block_size)
    size = block_bytes(config, block_size, ops.kv_dtype)
    blocks = ops.empty((num_blocks, size + draft_bytes(ops, draft_shape)), np.dtype(np.uint8))
    cache = blocks[:, :size].view(ops.kv_dtype).reshape(num_blocks, *shape)
    draft = blocks[:, size:].view(ops.dtype).reshape(num_blocks, *draft_shape)
    return blocks, cache, draft


def draft_bytes(ops: Ops, draft_shape: tuple[int, ...]) -> int:
    return int(np.prod(draft_shape)) * ops.dtype.itemsize


def allocate(ops: Ops, config: ModelConfig, num_blocks: int, block_size: int) -> Array:
    """Return an undefined cache [num_blocks, L, 2, Hkv, B, D] in `ops.kv_dtype`."""
    return ops.empty((num_blocks, *block_shape(config, block_size)), ops.kv_dtype)

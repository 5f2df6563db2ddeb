"""The paged KV cache: one array, in which a block is contiguous over all layers."""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig
from model.ops.group.arrays import Section, Split, divided
from model.ops.interface import Array, Ops


def block_shape(config: ModelConfig, block_size: int, num_ranks: int = 1) -> tuple[int, ...]:
    """Return a rank's [L, 2 (keys, values), Hkv, B, D]."""
    return part_of_heads(config, num_ranks).part_shape(
        (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim), num_ranks
    )


def block_bytes(config: ModelConfig, block_size: int, dtype: np.dtype, num_ranks: int = 1) -> int:
    """Return a rank's bytes per block."""
    return int(np.prod(block_shape(config, block_size, num_ranks))) * np.dtype(dtype).itemsize


def allocate_with_draft(
    ops: Ops, config: ModelConfig, num_blocks: int, block_size: int, draft_shape: tuple[int, ...]
) -> tuple[Array | None, Array, Array]:
    """Return (whole blocks uint8[num_blocks, bytes], cache, drafter's cache [num_blocks, *draft_shape] in `ops.dtype`).

    Both caches lie in the blocks, so copies and swaps of blocks move both. Each rank has as many blocks as the fullest
    rank, so a drafter on rank 0 takes memory on all. GPU kernels take no strided rows: there the caches are separate,
    whole blocks are None, and a copied or swapped block has no drafter's keys.
    """
    if ops.name == "cuda":
        return None, allocate(ops, config, num_blocks, block_size), ops.empty((num_blocks, *draft_shape), ops.dtype)
    shape = block_shape(config, block_size, ops.num_ranks)
    size = block_bytes(config, block_size, ops.kv_dtype, ops.num_ranks)
    blocks = ops.empty((num_blocks, size + draft_bytes(ops, draft_shape)), np.dtype(np.uint8))
    cache = _of_heads(blocks[:, :size].view(ops.kv_dtype).reshape(num_blocks, *shape), config, ops)
    draft = blocks[:, size:].view(ops.dtype).reshape(num_blocks, *draft_shape)
    return blocks, cache, draft


def allocate_with_head(ops: Ops, config: ModelConfig, num_blocks: int, block_size: int) -> Array:
    """Return a cache [num_blocks, L + 1, 2, Hkv, B, D] of the model's shape, whose last layer is a draft head's."""
    layers, *rest = block_shape(config, block_size)
    return ops.empty((num_blocks, layers + 1, *rest), ops.kv_dtype)


def draft_bytes(ops: Ops, draft_shape: tuple[int, ...]) -> int:
    return int(np.prod(draft_shape)) * ops.dtype.itemsize


def allocate(ops: Ops, config: ModelConfig, num_blocks: int, block_size: int) -> Array:
    """Return an undefined cache [num_blocks, L, 2, Hkv, B, D] in `ops.kv_dtype`, with each rank's heads."""
    array = ops.empty((num_blocks, *block_shape(config, block_size, ops.num_ranks)), ops.kv_dtype)
    return _of_heads(array, config, ops)


def _of_heads(cache: Array, config: ModelConfig, ops: Ops) -> Array:
    return divided(cache, Split(3, part_of_heads(config, ops.num_ranks).sections))


def part_of_heads(config: ModelConfig, num_ranks: int) -> Split:
    """Return the split of KV heads, an axis of [L, 2, Hkv, ...]; if fewer than ranks, neighbours share copies."""
    return Split(2, (Section(config.num_kv_heads, max(1, num_ranks // config.num_kv_heads)),))

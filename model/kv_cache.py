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


def allocate(ops: Ops, config: ModelConfig, num_blocks: int, block_size: int) -> Array:
    """Return an undefined cache [num_blocks, L, 2, Hkv, B, D] in `ops.kv_dtype`."""
    return ops.empty((num_blocks, *block_shape(config, block_size)), ops.kv_dtype)

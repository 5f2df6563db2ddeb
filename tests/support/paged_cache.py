"""Paged caches for attention tests: random where visible to a sequence, else NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.ops.fp8 import narrow
from tests.support.kernel_checks import NUMPY_DTYPES, normal

LAYER, NUM_LAYERS = 1, 2
E4M3_NAN = 0x7F
UNKNOWN_BLOCKS = np.array([1 << 30, -1, -(1 << 31)], np.int32)


@dataclass(frozen=True)
class Heads:
    dtype: str
    head_dim: int
    group: int
    num_kv_heads: int
    block_size: int
    in_fp8: bool = False  # the cache

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def kv_dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self.in_fp8 else NUMPY_DTYPES[self.dtype]

    @property
    def nan(self) -> float:
        """NaN as an element of the cache."""
        return E4M3_NAN if self.in_fp8 else np.nan


@dataclass(frozen=True)
class PagedCache:
    """Cache with blocks in random order. Table entries past a context's end are invalid block ids."""

    kv: np.ndarray  # [num_blocks, NUM_LAYERS, 2, Hkv, block_size, head_dim], only LAYER is not NaN
    block_tables: np.ndarray  # int32[S, max_blocks]
    context_lens: np.ndarray  # int32[S]
    kv_scales: np.ndarray | None = None  # float32[NUM_LAYERS, 2, Hkv] of a cache in e4m3

    def known_tables(self) -> np.ndarray:
        """Return the tables with block 0 for invalid ids: the reference reads blocks that it does not use."""
        known = (self.block_tables >= 0) & (self.block_tables < len(self.kv))
        return np.where(known, self.block_tables, 0)


def paged_cache(rng: np.random.Generator, heads: Heads, context_lens: list[int], first_seen: list[int]) -> PagedCache:
    """`first_seen[s]`: first token visible to any query; earlier ones are NaN like free slots."""
    size = heads.block_size
    lens = np.array(context_lens, np.int32)
    num_blocks = -(-lens // size)
    tables = rng.choice(UNKNOWN_BLOCKS, (len(lens), int(num_blocks.max()) + 2))
    free = rng.permutation(int(num_blocks.sum()) + 5)  # five blocks are in no table
    shape = (len(free), NUM_LAYERS, 2, heads.num_kv_heads, size, heads.head_dim)
    kv = np.full(shape, np.nan, NUMPY_DTYPES[heads.dtype])
    for s, length in enumerate(lens):
        tables[s, : num_blocks[s]], free = np.split(free, [num_blocks[s]])
        at = np.arange(min(first_seen[s], length), length)
        shown = normal(rng, (len(at), 2, heads.num_kv_heads, heads.head_dim), heads.dtype)
        kv[tables[s, at // size], LAYER, :, :, at % size] = shown
    bits, scales = in_e4m3(rng, kv) if heads.in_fp8 else (kv, None)
    return PagedCache(bits, tables.astype(np.int32), lens, scales)


def in_e4m3(rng: np.random.Generator, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return random e4m3 with different scales per layer, side and head."""
    scales = rng.uniform(0.005, 0.05, kv.shape[1:4]).astype(np.float32)
    return narrow(kv.astype(np.float32) / scales[None, :, :, :, None, None]), scales


def poisoned(ops, like: np.ndarray):
    """Return an array of NaN on the device."""
    return ops.upload(np.full_like(like, np.nan))


def captured(ops, launches: list[Callable[[], object]]) -> Callable[[], object]:
    """Capture the launches as one CUDA graph, to time the device alone. Each has run once before."""
    for _ in range(2):  # the first allocates, which a capture must not
        with ops.scratch():
            for launch in launches:
                launch()
    with ops.scratch():
        ops.stream.begin_capture()
        for launch in launches:
            launch()
        graph = ops.stream.end_capture()
    return lambda: graph.launch(ops.stream)


def large_cache(ops, num_blocks: int, num_layers: int, heads: Heads):
    """Return a large cache on the device; every block holds the same random numbers."""
    shape = (num_blocks, num_layers, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    kv = ops.empty(shape, heads.kv_dtype)
    random = normal(np.random.default_rng(0), (1, *shape[1:]), heads.dtype)
    block = ops.upload(in_e4m3(np.random.default_rng(0), random)[0] if heads.in_fp8 else random)
    for i in range(num_blocks):
        (kv.data + i * block.nbytes).copy_from_device_async(block.data, block.nbytes, ops.stream)
    ops.synchronize()
    return kv


def drafted_rows(drafted: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return sequence and context of each row; `drafted`: each sequence's first context and number of rows."""
    rows = [(number, first + at) for number, (first, count) in enumerate(drafted) for at in range(count)]
    return [number for number, _ in rows], [length for _, length in rows]

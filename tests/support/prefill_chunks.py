"""Chunks of several sequences for prefill attention: inputs, the reference's results, timing."""

from __future__ import annotations

import importlib

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import AttentionBatch
from tests.support.kernel_checks import NUM_DRAWN, NUMPY_DTYPES, normal, repeated, report_flops, seconds_of
from tests.support.paged_cache import LAYER, Heads, PagedCache, captured, large_cache, paged_cache, poisoned

FRESH = [(n, n) for n in (1, 15, 16, 17, 63, 64, 65)]
"""(length of the context, of the chunk): whole prompts."""

CHUNKS = [(1000, 130), (200, 1), (64, 0), (333, 64), (129, 100)]
"""Chunks after cached tokens."""

SHORT = [(2112, 64), (5000, 17), (300, 300), (128, 0), (700, 30)]
"""Few rows after long contexts: several CTAs share a tile's keys, more for longer contexts."""


def start_of(chunks: list[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([n for _, n in chunks])]).astype(np.int32)


def expected(q: np.ndarray, cache: PagedCache, start: np.ndarray, scale: float, window: int) -> np.ndarray:
    """Return the reference's results in float32 from the rounded inputs, then in their dtype. It skips empty chunks."""
    out = np.full(q.shape, np.nan, np.float32)
    some = np.flatnonzero(np.diff(start))
    tables, lens, longest = cache.known_tables()[some], cache.context_lens[some], int(np.diff(start).max())
    start = np.append(start[some], start[-1])
    chunks = {"query_start": start, "max_query_len": longest}
    batch = AttentionBatch(cache.kv, LAYER, tables, lens, scale, window, **chunks, kv_scales=cache.kv_scales)
    NumpyOps().paged_prefill_attention(q, batch, out)
    return out.astype(q.dtype)


def prefilled(
    ops, q, cache: PagedCache, start: np.ndarray, max_query_len: int, scale: float, window: int, num_more: int = 0
):
    """Run the op. `num_more` rows of NaN follow the chunks' rows as padding; their results must not change."""
    num_rows = len(q)
    q = np.concatenate([q, np.full((num_more, *q.shape[1:]), np.nan, q.dtype)])
    out = poisoned(ops, q)
    rows = ops.upload(cache.block_tables), ops.upload(cache.context_lens)
    chunks = ops.upload(start), max_query_len
    with ops.scratch():
        scales = None if cache.kv_scales is None else ops.upload(cache.kv_scales)
        batch = AttentionBatch(ops.upload(cache.kv), LAYER, *rows, scale, window, *chunks, kv_scales=scales)
        ops.paged_prefill_attention(ops.upload(q), batch, out)
        out = ops.download(out)
    assert np.isnan(out[num_rows:].astype(np.float32)).all()
    return out[:num_rows]


def cached(rng, heads: Heads, window: int, chunks: list[tuple[int, int]]):
    """Return (q, cache, query_start) of these chunks."""
    lengths = [length for length, _ in chunks]
    cache = paged_cache(rng, heads, lengths, [max(0, length - n + 1 - window) for length, n in chunks])
    start = start_of(chunks)
    return normal(rng, (start[-1], heads.num_heads, heads.head_dim), heads.dtype), cache, start


def backend(in_fp8: bool = False):
    """Return the GPU backend in bfloat16 without poisoned temporaries, for timing."""
    kv_dtype = np.dtype(np.uint8) if in_fp8 else None
    return importlib.import_module("model.ops.gpu.ops").CudaOps(NUMPY_DTYPES["bfloat16"], kv_dtype)


def report_speed(ops, rng, num_sequences: int, length: int, what: str) -> None:
    """Report the speed of whole prompts with the heads of Llama-3.1-8B."""
    in_fp8 = ops.kv_dtype == np.uint8
    heads, num_layers = Heads("bfloat16", 128, 4, 8, 16, in_fp8), 4
    scales = ops.upload(np.ones((num_layers, 2, heads.num_kv_heads), np.float32)) if in_fp8 else None
    blocks_each = length // heads.block_size
    kv = large_cache(ops, num_sequences * blocks_each, num_layers, heads)
    tables = rng.permutation(num_sequences * blocks_each).astype(np.int32).reshape(num_sequences, -1)
    start = ops.upload(np.arange(num_sequences + 1, dtype=np.int32) * length)
    shape = (num_sequences * length, heads.num_heads, heads.head_dim)
    q = ops.upload(repeated(normal(rng, (NUM_DRAWN, *shape[1:]), "bfloat16"), *shape))
    out = ops.empty(shape, ops.dtype)
    arrays = ops.upload(tables), ops.upload(np.full(num_sequences, length, np.int32))
    batches = [
        AttentionBatch(kv, layer, *arrays, 0.088, query_start=start, max_query_len=length, kv_scales=scales)
        for layer in range(num_layers)
    ]
    launches = [lambda batch=batch: ops.paged_prefill_attention(q, batch, out) for batch in batches]
    seconds = seconds_of(ops, [captured(ops, launches)] * 8) / num_layers  # eight, to hide the first launch
    num_flops = 4 * heads.head_dim * heads.num_heads * num_sequences * length * (length + 1) // 2
    report_flops(f"{what} {heads.kv_dtype} {num_sequences} x {length}", num_flops, seconds)
    assert np.isfinite(ops.download(out).astype(np.float32)).all()

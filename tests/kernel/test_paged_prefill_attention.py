"""Prefill attention against its twin over every tile shape, and how near it comes to the tensor cores' speed."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from model.ops.interface import NO_WINDOW
from model.ops.numpy_ops import NumpyOps
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal, seconds_of, tell_flops
from tests.support.paged_cache import LAYER, Heads, PagedCache, captured, large_cache, paged_cache, poisoned

pytestmark = pytest.mark.gpu

FRESH = [(n, n) for n in (1, 15, 16, 17, 63, 64, 65)]
"""(length of the context, of the chunk): whole prompts."""

CHUNKS = [(1000, 130), (200, 1), (64, 0), (333, 64), (129, 100)]
"""Chunks behind what is cached already."""

LONG = [(1000, 1000)]

CASES = [
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, FRESH + CHUNKS),
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, LONG),
    (Heads("bfloat16", 128, 4, 2, 16), 100, CHUNKS + LONG),
    (Heads("bfloat16", 128, 1, 2, 8), 64, CHUNKS),
    (Heads("bfloat16", 128, 16, 1, 32), NO_WINDOW, FRESH),
    (Heads("bfloat16", 64, 8, 1, 16), NO_WINDOW, CHUNKS),
    (Heads("bfloat16", 64, 5, 1, 8), 1, FRESH),
    (Heads("bfloat16", 96, 3, 2, 32), 33, FRESH + CHUNKS),
    (Heads("bfloat16", 256, 2, 1, 16), NO_WINDOW, FRESH + CHUNKS),
    (Heads("float16", 128, 7, 1, 16), NO_WINDOW, [(40, 3), (17, 2), (100, 1)]),
    (Heads("float16", 64, 1, 2, 32), 200, CHUNKS),
    (Heads("float16", 80, 6, 1, 8), NO_WINDOW, FRESH + CHUNKS),
    (Heads("float16", 96, 4, 1, 16), NO_WINDOW, FRESH),
    (Heads("float16", 256, 16, 1, 8), 50, CHUNKS),
    (Heads("float32", 64, 4, 1, 16), NO_WINDOW, FRESH),
    (Heads("float32", 80, 3, 1, 8), 20, FRESH),
    (Heads("float32", 128, 2, 2, 16), NO_WINDOW, CHUNKS),
    (Heads("float32", 256, 1, 1, 32), 1000, FRESH),
]


def start_of(chunks: list[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([n for _, n in chunks])]).astype(np.int32)


def expected(q: np.ndarray, cache: PagedCache, start: np.ndarray, scale: float, window: int) -> np.ndarray:
    """In float32 from the rounded inputs, then in their dtype. The twin knows no empty chunks."""
    out = np.full(q.shape, np.nan, np.float32)
    some = np.flatnonzero(np.diff(start))
    tables, lens, longest = cache.known_tables()[some], cache.context_lens[some], int(np.diff(start).max())
    start = np.append(start[some], start[-1])
    NumpyOps().paged_prefill_attention(q, cache.kv, LAYER, tables, lens, start, longest, scale, window, out)
    return out.astype(q.dtype)


def prefilled(ops, q, cache: PagedCache, start: np.ndarray, max_query_len: int, scale: float, window: int):
    out = poisoned(ops, q)
    rows = ops.upload(cache.block_tables), ops.upload(cache.context_lens), ops.upload(start)
    with ops.scratch():
        ops.paged_prefill_attention(
            ops.upload(q), ops.upload(cache.kv), LAYER, *rows, max_query_len, scale, window, out
        )
        return ops.download(out)


def cached(rng, heads: Heads, window: int, chunks: list[tuple[int, int]]):
    """(q, cache, query_start) of these chunks."""
    lengths = [length for length, _ in chunks]
    cache = paged_cache(rng, heads, lengths, [max(0, length - n + 1 - window) for length, n in chunks])
    start = start_of(chunks)
    return normal(rng, (start[-1], heads.num_heads, heads.head_dim), heads.dtype), cache, start


@pytest.mark.parametrize(("heads", "window", "chunks"), CASES, ids=str)
def test_is_its_twin(open_ops, rng, heads, window, chunks):
    q, cache, start = cached(rng, heads, window, chunks)
    longest, scale = max(n for _, n in chunks), heads.head_dim**-0.5
    out = prefilled(open_ops(heads.dtype), q, cache, start, longest, scale, window)
    assert_close(out, expected(q, cache, start, scale, window), heads.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bound_far_above_the_longest_chunk_changes_nothing(open_ops, rng, dtype):
    q, cache, start = cached(rng, Heads(dtype, 128, 4, 2, 16), NO_WINDOW, CHUNKS)
    tight = prefilled(open_ops(dtype), q, cache, start, 130, 0.1, NO_WINDOW)
    np.testing.assert_array_equal(tight, prefilled(open_ops(dtype), q, cache, start, 4096, 0.1, NO_WINDOW))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_block_that_does_not_exist_reads_as_zeros(open_ops, rng, dtype):
    q, cache, start = cached(rng, Heads(dtype, 64, 4, 2, 8), NO_WINDOW, [(50, 20), (300, 70)])
    zeros = cache.block_tables[0, 3], cache.block_tables[1, 10]
    cache.kv[zeros, LAYER] = 0
    wanted = expected(q, cache, start, 0.125, NO_WINDOW)
    cache.kv[zeros, LAYER] = np.nan
    cache.block_tables[0, 3], cache.block_tables[1, 10] = len(cache.kv), -1
    assert_close(prefilled(open_ops(dtype), q, cache, start, 70, 0.125, NO_WINDOW), wanted, dtype)


def test_a_nan_in_the_cache_reaches_the_rows_that_see_it_and_no_other(open_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, [(100, 100)])
    cache.kv[cache.block_tables[0, 2], LAYER, 0, 1, 5, 7] = np.nan  # key 37 of the second kv head
    out = prefilled(open_ops("bfloat16"), q, cache, start, 100, 0.1, NO_WINDOW).astype(np.float32)
    assert np.isnan(out[37:, 4:]).all()
    assert np.isfinite(out[:37]).all()
    assert np.isfinite(out[:, :4]).all()


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_speed(open_ops, rng, num_sequences):
    open_ops("bfloat16")  # skips without a GPU
    ops = importlib.import_module("model.ops.cuda_ops").CudaOps(NUMPY_DTYPES["bfloat16"])  # temporaries not poisoned
    heads, length, num_layers = Heads("bfloat16", 128, 4, 8, 16), 4096, 4
    blocks_each = length // heads.block_size
    kv = large_cache(ops, num_sequences * blocks_each, num_layers, heads)
    tables = rng.permutation(num_sequences * blocks_each).astype(np.int32).reshape(num_sequences, -1)
    start = ops.upload(np.arange(num_sequences + 1, dtype=np.int32) * length)
    shape = (num_sequences * length, heads.num_heads, heads.head_dim)
    q, out = ops.upload(normal(rng, shape, "bfloat16")), ops.empty(shape, ops.dtype)
    arrays = ops.upload(tables), ops.upload(np.full(num_sequences, length, np.int32)), start
    launches = [
        lambda layer=layer: ops.paged_prefill_attention(q, kv, layer, *arrays, length, 0.088, NO_WINDOW, out)
        for layer in range(num_layers)
    ]
    seconds = seconds_of(ops, [captured(ops, launches)] * 8) / num_layers  # eight, to hide the first one's launch
    num_flops = 4 * heads.head_dim * heads.num_heads * num_sequences * length * (length + 1) // 2
    tell_flops(f"paged_prefill_attention {num_sequences} x {length}", num_flops, seconds)
    assert np.isfinite(ops.download(out).astype(np.float32)).all()

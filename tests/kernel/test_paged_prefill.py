"""Prefill attention against its reference over every tile shape, and how near it comes to the tensor cores' speed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.interface import NO_WINDOW
from tests.support.kernel_checks import assert_close
from tests.support.paged_cache import LAYER, Heads
from tests.support.prefill_chunks import CHUNKS, FRESH, backend, cached, expected, prefilled, report_speed

pytestmark = pytest.mark.gpu

LONG = [(1000, 1000)]


@pytest.fixture
def open_ops(open_ops, monkeypatch):
    """Without the kernel that Hopper has for itself."""

    def open_(dtype: str, kv_dtype: np.dtype | None = None):
        ops = open_ops(dtype, kv_dtype)
        monkeypatch.setattr(ops, "arch", "80")
        return ops

    return open_


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
    (Heads("bfloat16", 128, 4, 2, 16, in_fp8=True), NO_WINDOW, FRESH + CHUNKS),
    (Heads("bfloat16", 128, 4, 2, 16, in_fp8=True), 100, CHUNKS + LONG),
    (Heads("bfloat16", 64, 5, 1, 8, in_fp8=True), 1, FRESH),
    (Heads("bfloat16", 256, 2, 1, 16, in_fp8=True), NO_WINDOW, FRESH + CHUNKS),
    (Heads("float16", 80, 6, 1, 8, in_fp8=True), NO_WINDOW, FRESH + CHUNKS),
    (Heads("float16", 96, 4, 1, 128, in_fp8=True), NO_WINDOW, FRESH),
    (Heads("float32", 80, 3, 1, 8, in_fp8=True), 20, FRESH),
]


@pytest.mark.parametrize(("heads", "window", "chunks"), CASES, ids=str)
def test_is_its_reference(open_ops, rng, heads, window, chunks):
    q, cache, start = cached(rng, heads, window, chunks)
    longest, scale = max(n for _, n in chunks), heads.head_dim**-0.5
    out = prefilled(open_ops(heads.dtype, heads.kv_dtype), q, cache, start, longest, scale, window)
    assert_close(out, expected(q, cache, start, scale, window), heads.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bound_far_above_the_longest_chunk_changes_nothing(open_ops, rng, dtype):
    q, cache, start = cached(rng, Heads(dtype, 128, 4, 2, 16), NO_WINDOW, CHUNKS)
    tight = prefilled(open_ops(dtype), q, cache, start, 130, 0.1, NO_WINDOW)
    np.testing.assert_array_equal(tight, prefilled(open_ops(dtype), q, cache, start, 4096, 0.1, NO_WINDOW))


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_block_that_does_not_exist_reads_as_zeros(open_ops, rng, dtype, in_fp8):
    heads = Heads(dtype, 64, 4, 2, 8, in_fp8)
    q, cache, start = cached(rng, heads, NO_WINDOW, [(50, 20), (300, 70)])
    zeros = cache.block_tables[0, 3], cache.block_tables[1, 10]
    cache.kv[zeros, LAYER] = 0
    wanted = expected(q, cache, start, 0.125, NO_WINDOW)
    cache.kv[zeros, LAYER] = heads.nan
    cache.block_tables[0, 3], cache.block_tables[1, 10] = len(cache.kv), -1
    ops = open_ops(dtype, heads.kv_dtype)
    assert_close(prefilled(ops, q, cache, start, 70, 0.125, NO_WINDOW), wanted, dtype)


def test_a_nan_in_the_cache_reaches_the_rows_that_see_it_and_no_other(open_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, [(100, 100)])
    cache.kv[cache.block_tables[0, 2], LAYER, 0, 1, 5, 7] = np.nan  # key 37 of the second kv head
    out = prefilled(open_ops("bfloat16"), q, cache, start, 100, 0.1, NO_WINDOW).astype(np.float32)
    assert np.isnan(out[37:, 4:]).all()
    assert np.isfinite(out[:37]).all()
    assert np.isfinite(out[:, :4]).all()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_speed(open_ops, rng, monkeypatch, num_sequences, in_fp8):
    open_ops("bfloat16")  # skips without a GPU
    ops = backend(in_fp8)
    monkeypatch.setattr(ops, "arch", "80")
    report_speed(ops, rng, num_sequences, 4096, "paged_prefill")

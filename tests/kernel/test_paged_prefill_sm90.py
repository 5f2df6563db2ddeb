"""Prefill attention on Hopper (wgmma) against its reference, and its speed against the tensor cores."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.interface import NO_WINDOW
from tests.support.kernel_checks import assert_close
from tests.support.paged_cache import LAYER, Heads
from tests.support.prefill_chunks import CHUNKS, FRESH, SHORT, backend, cached, expected, report_speed
from tests.support.prefill_chunks import prefilled as prefilled_in_step

pytestmark = pytest.mark.gpu

LONG = [(1000, 1000), (5, 5), (777, 600)]
MANY = [(40 + 3 * i, 20 + i) for i in range(70)]
"""More sequences than a warp has lanes, more pieces than a device has multiprocessors."""

CASES = [
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, FRESH + CHUNKS),
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, LONG),
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, MANY),
    (Heads("bfloat16", 128, 4, 2, 16), 100, CHUNKS + LONG),
    (Heads("bfloat16", 128, 4, 8, 16), 130, [(2500, 2100)]),
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW, [(2112, 64)]),
    (Heads("bfloat16", 128, 4, 1, 16), NO_WINDOW, SHORT),
    (Heads("bfloat16", 128, 16, 1, 32), 1500, SHORT),
    (Heads("float16", 64, 5, 2, 8), NO_WINDOW, SHORT),
    (Heads("bfloat16", 128, 1, 2, 8), 64, CHUNKS),
    (Heads("bfloat16", 128, 16, 1, 32), NO_WINDOW, FRESH),
    (Heads("bfloat16", 128, 7, 1, 64), NO_WINDOW, FRESH + CHUNKS),
    (Heads("bfloat16", 128, 3, 2, 256), 50, LONG),
    (Heads("bfloat16", 64, 8, 1, 16), NO_WINDOW, CHUNKS),
    (Heads("bfloat16", 64, 5, 1, 8), 1, FRESH),
    (Heads("float16", 128, 7, 1, 16), NO_WINDOW, [(40, 30), (17, 2), (100, 1)]),
    (Heads("float16", 128, 4, 2, 32), 17, LONG),
    (Heads("float16", 64, 1, 2, 32), 200, CHUNKS),
    (Heads("float16", 64, 4, 2, 16), NO_WINDOW, LONG),
    (Heads("bfloat16", 128, 4, 2, 16, in_fp8=True), NO_WINDOW, FRESH + CHUNKS),
    (Heads("bfloat16", 128, 4, 2, 16, in_fp8=True), NO_WINDOW, MANY),
    (Heads("bfloat16", 128, 4, 2, 16, in_fp8=True), 100, CHUNKS + LONG),
    (Heads("bfloat16", 128, 4, 8, 8, in_fp8=True), 130, [(2500, 2100)]),
    (Heads("bfloat16", 128, 4, 1, 32, in_fp8=True), NO_WINDOW, SHORT),
    (Heads("bfloat16", 128, 3, 2, 256, in_fp8=True), 50, LONG),
    (Heads("float16", 128, 4, 2, 16, in_fp8=True), NO_WINDOW, LONG),
    (Heads("float16", 64, 5, 2, 8, in_fp8=True), NO_WINDOW, SHORT),
    (Heads("bfloat16", 64, 8, 1, 16, in_fp8=True), NO_WINDOW, CHUNKS),
]


def prefilled(*arguments):
    """Run a step whose tiles fill the device: smaller ones take another kernel."""
    return prefilled_in_step(*arguments, num_more=3000)


@pytest.mark.parametrize(("heads", "window", "chunks"), CASES, ids=str)
def test_is_its_reference(open_hopper_ops, rng, heads, window, chunks):
    q, cache, start = cached(rng, heads, window, chunks)
    longest, scale = max(n for _, n in chunks), heads.head_dim**-0.5
    wanted = expected(q, cache, start, scale, window)
    for _ in range(2):  # the second launch finds the counter as the first left it
        out = prefilled(open_hopper_ops(heads.dtype, heads.kv_dtype), q, cache, start, longest, scale, window)
        assert_close(out, wanted, heads.dtype)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_parts_make_the_same_bits_each_time(open_hopper_ops, rng, in_fp8):
    heads = Heads("bfloat16", 128, 4, 1, 16, in_fp8)
    q, cache, start = cached(rng, heads, NO_WINDOW, SHORT)
    ops = open_hopper_ops("bfloat16", heads.kv_dtype)
    first, *others = (prefilled(ops, q, cache, start, 300, 0.088, NO_WINDOW) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_scores_of_any_size_make_weights(open_hopper_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, LONG)
    wanted = expected(q, cache, start, 3.0, NO_WINDOW)
    assert_close(prefilled(open_hopper_ops("bfloat16"), q, cache, start, 1000, 3.0, NO_WINDOW), wanted, "bfloat16")


def test_a_bound_far_above_the_longest_chunk_changes_nothing(open_hopper_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, CHUNKS)
    tight = prefilled(open_hopper_ops("bfloat16"), q, cache, start, 130, 0.1, NO_WINDOW)
    loose = prefilled(open_hopper_ops("bfloat16"), q, cache, start, 4096, 0.1, NO_WINDOW)
    np.testing.assert_array_equal(tight, loose)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_that_does_not_exist_reads_as_zeros(open_hopper_ops, rng, head_dim, in_fp8):
    heads = Heads("bfloat16", head_dim, 4, 2, 8, in_fp8)
    q, cache, start = cached(rng, heads, NO_WINDOW, [(50, 20), (300, 70)])
    zeros = cache.block_tables[0, 3], cache.block_tables[1, 10]
    cache.kv[zeros, LAYER] = 0
    wanted = expected(q, cache, start, 0.125, NO_WINDOW)
    cache.kv[zeros, LAYER] = heads.nan
    cache.block_tables[0, 3], cache.block_tables[1, 10] = len(cache.kv), -1
    ops = open_hopper_ops("bfloat16", heads.kv_dtype)
    assert_close(prefilled(ops, q, cache, start, 70, 0.125, NO_WINDOW), wanted, "bfloat16")


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_nan_in_the_cache_reaches_the_rows_that_see_it_and_no_other(open_hopper_ops, rng, in_fp8):
    heads = Heads("bfloat16", 128, 4, 2, 16, in_fp8)
    q, cache, start = cached(rng, heads, NO_WINDOW, [(100, 100)])
    cache.kv[cache.block_tables[0, 2], LAYER, 0, 1, 5, 7] = heads.nan  # key 37 of the second kv head
    ops = open_hopper_ops("bfloat16", heads.kv_dtype)
    out = prefilled(ops, q, cache, start, 100, 0.1, NO_WINDOW).astype(np.float32)
    assert np.isnan(out[37:, 4:]).all()
    assert np.isfinite(out[:37]).all()
    assert np.isfinite(out[:, :4]).all()


def test_a_nan_in_one_part_reaches_every_row_that_sees_it(open_hopper_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, [(2112, 64)])
    cache.kv[cache.block_tables[0, 40], LAYER, 1, 0, 3, 9] = np.nan
    out = prefilled(open_hopper_ops("bfloat16"), q, cache, start, 64, 0.1, NO_WINDOW).astype(np.float32)
    assert np.isnan(out[:, :4, 9]).all()
    assert np.isfinite(out[:, 4:]).all()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(("num_sequences", "length"), [(16, 1024), (1, 4096), (4, 4096), (1, 16384)])
def test_speed(open_hopper_ops, rng, num_sequences, length, in_fp8):
    open_hopper_ops("bfloat16")  # skips without a GPU
    report_speed(backend(in_fp8), rng, num_sequences, length, "paged_prefill_sm90")

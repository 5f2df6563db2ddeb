"""Prefill attention of few rows on Hopper against its reference, alone in its step and with others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.ops.interface import NO_WINDOW
from tests.support.kernel_checks import assert_close, normal
from tests.support.paged_cache import LAYER, Heads
from tests.support.prefill_chunks import CHUNKS, FRESH, SHORT, cached, expected, prefilled

pytestmark = pytest.mark.gpu

PAIRS = [(50 + 7 * i, 2) for i in range(40)]
"""More sequences than a warp has lanes; with eight kv heads, more pieces than a device has multiprocessors."""

CASES = [
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW, [(2112, 64)]),
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW, [(8200, 128)]),
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW, [(1030, 17)]),
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW, [(1030, 40), (64, 0), (777, 40)]),
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW, PAIRS),
    (Heads("bfloat16", 128, 4, 8, 16), 100, PAIRS),
    (Heads("bfloat16", 128, 4, 8, 16), 700, [(2112, 64)]),
    (Heads("bfloat16", 128, 4, 1, 16), NO_WINDOW, SHORT),
    (Heads("bfloat16", 128, 16, 1, 32), 1500, SHORT),
    (Heads("bfloat16", 128, 7, 1, 64), NO_WINDOW, FRESH + CHUNKS),
    (Heads("bfloat16", 128, 3, 1, 256), 50, SHORT),
    (Heads("bfloat16", 64, 8, 1, 16), NO_WINDOW, SHORT),
    (Heads("bfloat16", 64, 4, 8, 16), NO_WINDOW, [(4000, 63)]),
    (Heads("float16", 64, 5, 2, 8), NO_WINDOW, SHORT),
    (Heads("float16", 128, 4, 2, 32), 17, CHUNKS),
    (Heads("float16", 128, 4, 8, 8), NO_WINDOW, [(2112, 64)]),
    (Heads("bfloat16", 128, 4, 8, 16, in_fp8=True), NO_WINDOW, [(2112, 64)]),
    (Heads("bfloat16", 128, 4, 8, 16, in_fp8=True), NO_WINDOW, [(1030, 40), (64, 0), (777, 40)]),
    (Heads("bfloat16", 128, 4, 8, 16, in_fp8=True), 100, PAIRS),
    (Heads("bfloat16", 128, 16, 1, 32, in_fp8=True), 1500, SHORT),
    (Heads("bfloat16", 128, 3, 1, 256, in_fp8=True), 50, SHORT),
    (Heads("float16", 64, 5, 2, 8, in_fp8=True), NO_WINDOW, SHORT),
    (Heads("float16", 128, 4, 8, 8, in_fp8=True), NO_WINDOW, [(2112, 64)]),
]


@pytest.mark.parametrize(("heads", "window", "chunks"), CASES, ids=str)
def test_is_its_reference(open_hopper_ops, rng, heads, window, chunks):
    q, cache, start = cached(rng, heads, window, chunks)
    longest, scale = max(n for _, n in chunks), heads.head_dim**-0.5
    wanted = expected(q, cache, start, scale, window)
    ops = open_hopper_ops(heads.dtype, heads.kv_dtype)
    first, second = (prefilled(ops, q, cache, start, max(longest, 65), scale, window) for _ in range(2))
    assert_close(first, wanted, heads.dtype)
    np.testing.assert_array_equal(second, first)


def test_chunks_behind_decodes_are_not_alone(open_hopper_ops, rng):
    heads = Heads("bfloat16", 128, 4, 8, 16)
    q, cache, start = cached(rng, heads, NO_WINDOW, [(2112, 64)])
    behind = np.concatenate([normal(rng, (5, *q.shape[1:]), "bfloat16"), q])
    out = prefilled(open_hopper_ops("bfloat16"), behind, cache, start + 5, 69, 0.088, NO_WINDOW)
    assert np.isnan(out[:5].astype(np.float32)).all()
    assert_close(out[5:], expected(q, cache, start, 0.088, NO_WINDOW), "bfloat16")


def test_padding_is_left_alone(open_hopper_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW, [(700, 20)])
    out = prefilled(open_hopper_ops("bfloat16"), q, cache, start, 64, 0.088, NO_WINDOW, num_more=44)
    assert_close(out, expected(q, cache, start, 0.088, NO_WINDOW), "bfloat16")


def test_scores_of_any_size_make_weights(open_hopper_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, [(2112, 64)])
    wanted = expected(q, cache, start, 3.0, NO_WINDOW)
    assert_close(prefilled(open_hopper_ops("bfloat16"), q, cache, start, 65, 3.0, NO_WINDOW), wanted, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_at_the_end_of_what_the_type_holds_stay_finite(open_hopper_ops, rng, dtype):
    q, cache, start = cached(rng, Heads(dtype, 128, 4, 2, 16), NO_WINDOW, [(2112, 64)])
    large = replace(cache, kv=cache.kv.copy())
    values = large.kv[:, LAYER, 1].astype(np.float32)
    large.kv[:, LAYER, 1] = np.clip(20000 * values, -65000, 65000).astype(large.kv.dtype)  # float16 ends at 65,504
    wanted = expected(q, large, start, 0.088, NO_WINDOW)
    assert_close(prefilled(open_hopper_ops(dtype), q, large, start, 65, 0.088, NO_WINDOW), wanted, dtype)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_that_does_not_exist_reads_as_zeros(open_hopper_ops, rng, head_dim, in_fp8):
    heads = Heads("bfloat16", head_dim, 4, 2, 8, in_fp8)
    q, cache, start = cached(rng, heads, NO_WINDOW, [(50, 20), (900, 70)])
    zeros = cache.block_tables[0, 3], cache.block_tables[1, 10]
    cache.kv[zeros, LAYER] = 0
    wanted = expected(q, cache, start, 0.125, NO_WINDOW)
    cache.kv[zeros, LAYER] = heads.nan
    cache.block_tables[0, 3], cache.block_tables[1, 10] = len(cache.kv), -1
    ops = open_hopper_ops("bfloat16", heads.kv_dtype)
    assert_close(prefilled(ops, q, cache, start, 70, 0.125, NO_WINDOW), wanted, "bfloat16")


def test_a_nan_in_one_part_reaches_every_row_that_sees_it(open_hopper_ops, rng):
    q, cache, start = cached(rng, Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW, [(2112, 64)])
    cache.kv[cache.block_tables[0, 40], LAYER, 1, 0, 3, 9] = np.nan
    out = prefilled(open_hopper_ops("bfloat16"), q, cache, start, 65, 0.1, NO_WINDOW).astype(np.float32)
    assert np.isnan(out[:, :4, 9]).all()
    assert np.isfinite(out[:, 4:]).all()
    assert np.isfinite(np.delete(out, 9, axis=2)).all()

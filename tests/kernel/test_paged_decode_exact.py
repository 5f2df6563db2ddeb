"""Attention of few decode rows: each gets the bits of a batch of one, and costs little more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import NO_WINDOW, AttentionBatch, HeadRotation
from tests.support.kernel_checks import assert_close, normal, seconds_of
from tests.support.paged_cache import (
    LAYER,
    Heads,
    PagedCache,
    captured,
    drafted_rows,
    large_cache,
    paged_cache,
    poisoned,
)

pytestmark = pytest.mark.gpu

CASES = [
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW),
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW),
    (Heads("bfloat16", 128, 8, 1, 8), NO_WINDOW),
    (Heads("bfloat16", 128, 20, 1, 16), 300),
    (Heads("bfloat16", 64, 1, 2, 16), NO_WINDOW),
    (Heads("bfloat16", 256, 2, 1, 32), NO_WINDOW),
    (Heads("float16", 96, 3, 2, 16), NO_WINDOW),
    (Heads("float32", 64, 4, 2, 16), NO_WINDOW),
    (Heads("bfloat16", 128, 4, 2, 16, in_fp8=True), NO_WINDOW),
    (Heads("bfloat16", 256, 16, 1, 16, in_fp8=True), 500),
]


@pytest.mark.parametrize(("heads", "window"), CASES, ids=str)
@pytest.mark.parametrize(
    "drafted", [[(1500, 5)], [(130, 9), (2300, 3), (0, 1)], [(4100, 9)], [(4219, 17)], [(26000, 2)]], ids=str
)
def test_each_row_has_the_bits_of_a_batch_of_one(open_ops, rng, heads, window, drafted):
    ops, (owners, lengths) = open_ops(heads.dtype, heads.kv_dtype), drafted_rows(drafted)
    longest = [max(1, first + count - 1) for first, count in drafted]
    cache = paged_cache(rng, heads, longest, [0] * len(drafted))
    q = normal(rng, (len(lengths), heads.num_heads, heads.head_dim), heads.dtype, scale=2.0)
    tables, lens = cache.block_tables[owners], np.array(lengths, np.int32)
    together = decoded(ops, q, cache, tables, lens, window, exact=True)
    again = decoded(ops, q, cache, tables, lens, window, exact=True)
    np.testing.assert_array_equal(together.view(np.uint8), again.view(np.uint8))
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decoded(ops, q[one], cache, tables[one], lens[one], window)
        np.testing.assert_array_equal(together[one].view(np.uint8), alone.view(np.uint8))


MANY = [
    [(300, 3)] * 12,
    [(40 * number, number % 5 + 1) for number in range(24)],
    [(1900, 17), (0, 1), (0, 1), (130, 9), (2300, 3)],
]


@pytest.mark.parametrize(("heads", "window"), CASES, ids=str)
@pytest.mark.parametrize("drafted", MANY, ids=lambda drafted: f"{drafted[:2]} of {len(drafted)}")
def test_many_rows_with_drafts_are_their_reference(open_ops, rng, heads, window, drafted):
    ops, (owners, lengths) = open_ops(heads.dtype, heads.kv_dtype), drafted_rows(drafted)
    longest = [max(1, first + count - 1) for first, count in drafted]
    cache = paged_cache(rng, heads, longest, [0] * len(drafted))
    q = normal(rng, (len(lengths), heads.num_heads, heads.head_dim), heads.dtype)
    tables, lens = cache.block_tables[owners], np.array(lengths, np.int32)
    out = decoded(ops, q, cache, tables, lens, window, drafted=True)
    again = decoded(ops, q, cache, tables, lens, window, drafted=True)
    np.testing.assert_array_equal(out.view(np.uint8), again.view(np.uint8))
    wanted = np.full(q.shape, np.nan, np.float32)
    batch = AttentionBatch(cache.kv, LAYER, cache.known_tables()[owners], lens, 0.1, window, kv_scales=cache.kv_scales)
    NumpyOps().paged_decode_attention(q, batch, wanted)
    assert_close(out, wanted.astype(q.dtype), heads.dtype)


def test_tokens_of_this_step_are_read_after_they_are_written(open_ops, rng, monkeypatch):
    """The captured kernel copies earlier ones while rope_kv_write runs."""
    ops, heads, (first, count) = open_ops("bfloat16"), Heads("bfloat16", 128, 4, 2, 16), (250, 9)
    _, lengths = drafted_rows([(first, count)])
    cache = paged_cache(rng, heads, [lengths[-1]], [0])
    positions = np.array(lengths, np.int32) - 1
    blocks, offsets = cache.block_tables[0, positions // heads.block_size], positions % heads.block_size
    cache.kv[blocks, LAYER, :, :, offsets] = np.nan
    tables, lens = cache.block_tables[np.zeros(count, np.int64)], np.array(lengths, np.int32)
    angles = rng.uniform(0, 6, (lengths[-1], heads.head_dim // 2)).astype(np.float32)
    rotation = HeadRotation(ops.upload(np.cos(angles)), ops.upload(np.sin(angles)), None, None, 1e-6)
    qkv = ops.upload(normal(rng, (count, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim), "bfloat16"))
    slots = ops.upload(blocks.astype(np.int64) * heads.block_size + offsets)
    sent, kv = [ops.upload(each) for each in (positions, tables, lens)], ops.upload(cache.kv)
    q, out = (ops.empty((count, heads.num_heads, heads.head_dim), ops.dtype) for _ in range(2))
    monkeypatch.setattr(ops, "is_poisoning", False)  # nothing runs between the two kernels
    with ops.scratch(), ops.exact_rows():
        batch = AttentionBatch(kv, LAYER, *sent[1:], 0.1)
        batch = replace(batch, plan=ops.plan_decode_attention(heads.num_heads, batch))

        def step():
            with ops.scratch():
                rotated = ops.rope_kv_write(qkv, rotation, sent[0], slots, kv, LAYER)
                ops.paged_decode_attention(rotated, batch, out)
                ops.place_columns(rotated.reshape(count, -1), q.reshape(count, -1), 0)

        replay = ops.capture(step)
        for _ in range(3):
            kv.data.copy_from_host_async(cache.kv.ctypes.data, cache.kv.nbytes, ops.stream)
            replay()
            together, written = ops.download(out), replace(cache, kv=ops.download(kv))
    queries = ops.download(q)
    for row in range(count):
        one = slice(row, row + 1)
        alone = decoded(ops, queries[one], written, tables[one], lens[one], NO_WINDOW)
        np.testing.assert_array_equal(together[one].view(np.uint8), alone.view(np.uint8))


def decoded(
    ops,
    q: np.ndarray,
    cache: PagedCache,
    tables: np.ndarray,
    lens: np.ndarray,
    window: int,
    *,
    exact: bool = False,
    drafted: bool = False,
) -> np.ndarray:
    out = poisoned(ops, q)
    with ops.scratch():
        scales = None if cache.kv_scales is None else ops.upload(cache.kv_scales)
        arrays = ops.upload(np.ascontiguousarray(tables)), ops.upload(lens)
        batch = AttentionBatch(ops.upload(cache.kv), LAYER, *arrays, 0.1, window, kv_scales=scales, drafted=drafted)
        queries = ops.upload(np.ascontiguousarray(q))
        if exact:
            with ops.exact_rows():
                ops.paged_decode_attention(queries, batch, out)
        else:
            ops.paged_decode_attention(queries, batch, out)
        return ops.download(out)


@pytest.mark.parametrize("length", [512, 4000, 16000])
def test_speed(open_ops, rng, length):
    """Drafts of one sequence cost little more than its token."""
    ops, heads = open_ops("bfloat16"), Heads("bfloat16", 128, 4, 8, 16)
    kv = large_cache(ops, 1024, 1, heads)
    for num_rows in (1, 5, 9, 17):
        q = normal(rng, (num_rows, heads.num_heads, heads.head_dim), "bfloat16")
        tables = np.arange(1024, dtype=np.int32)[None].repeat(num_rows, axis=0)
        arrays = ops.upload(tables), ops.upload(np.arange(length, length + num_rows, dtype=np.int32) - num_rows)
        batch = AttentionBatch(kv, 0, *arrays, 0.1, exact=num_rows > 1)
        queries, out = ops.upload(q), ops.empty(q.shape, ops.dtype)

        def launch(queries=queries, batch=batch, out=out, exact=num_rows > 1):
            if not exact:
                ops.paged_decode_attention(queries, batch, out)
                return
            with ops.exact_rows():
                ops.paged_decode_attention(queries, batch, out)

        seconds = seconds_of(ops, [captured(ops, [launch] * 16)]) / 16
        print(f"paged_decode with its plan, {num_rows} rows of a context of {length}: {1e6 * seconds:.1f} us")

"""Decode attention against its reference over every tile shape, and how near it comes to the memory's speed."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import NO_WINDOW, AttentionBatch
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal, report_bandwidth, seconds_of
from tests.support.paged_cache import LAYER, Heads, PagedCache, captured, large_cache, paged_cache, poisoned

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 1000, 333]

CASES = [
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW),
    (Heads("bfloat16", 128, 8, 1, 16), 100),
    (Heads("bfloat16", 128, 16, 1, 8), NO_WINDOW),
    (Heads("bfloat16", 128, 20, 1, 16), 300),
    (Heads("bfloat16", 128, 7, 1, 32), NO_WINDOW),
    (Heads("bfloat16", 64, 1, 2, 8), NO_WINDOW),
    (Heads("bfloat16", 96, 3, 2, 8), 33),
    (Heads("bfloat16", 256, 2, 2, 16), NO_WINDOW),
    (Heads("bfloat16", 256, 16, 1, 32), 500),
    (Heads("float16", 128, 4, 2, 32), 17),
    (Heads("float16", 64, 5, 1, 16), 1),
    (Heads("float16", 80, 8, 1, 32), NO_WINDOW),
    (Heads("float16", 96, 6, 1, 16), NO_WINDOW),
    (Heads("float16", 256, 1, 2, 8), 64),
    (Heads("float32", 64, 16, 1, 16), NO_WINDOW),
    (Heads("float32", 80, 3, 2, 8), 70),
    (Heads("float32", 128, 4, 2, 16), NO_WINDOW),
    (Heads("float32", 256, 2, 1, 32), 1000),
    (Heads("bfloat16", 128, 4, 2, 16, in_fp8=True), NO_WINDOW),
    (Heads("bfloat16", 128, 8, 1, 16, in_fp8=True), 100),
    (Heads("bfloat16", 128, 20, 1, 8, in_fp8=True), NO_WINDOW),
    (Heads("bfloat16", 64, 1, 2, 8, in_fp8=True), NO_WINDOW),
    (Heads("bfloat16", 96, 3, 2, 8, in_fp8=True), 33),
    (Heads("bfloat16", 256, 16, 1, 32, in_fp8=True), 500),
    (Heads("float16", 128, 4, 2, 32, in_fp8=True), 17),
    (Heads("float16", 80, 8, 1, 16, in_fp8=True), NO_WINDOW),
    (Heads("float16", 64, 5, 1, 16, in_fp8=True), 1),
    (Heads("float32", 64, 4, 2, 16, in_fp8=True), NO_WINDOW),
    (Heads("float32", 80, 3, 2, 8, in_fp8=True), 70),
]


def expected(q: np.ndarray, cache: PagedCache, scale: float, window: int) -> np.ndarray:
    """Return the reference's result in float32 from the rounded inputs, then in their dtype."""
    out = np.full(q.shape, np.nan, np.float32)
    tables, lens = cache.known_tables(), cache.context_lens
    batch = AttentionBatch(cache.kv, LAYER, tables, lens, scale, window, kv_scales=cache.kv_scales)
    NumpyOps().paged_decode_attention(q, batch, out)
    return out.astype(q.dtype)


def decoded(ops, q: np.ndarray, cache: PagedCache, scale: float, window: int) -> np.ndarray:
    out = poisoned(ops, q)
    tables, lens = ops.upload(cache.block_tables), ops.upload(cache.context_lens)
    with ops.scratch():
        scales = None if cache.kv_scales is None else ops.upload(cache.kv_scales)
        batch = AttentionBatch(ops.upload(cache.kv), LAYER, tables, lens, scale, window, kv_scales=scales)
        ops.paged_decode_attention(ops.upload(q), batch, out)
        return ops.download(out)


@pytest.mark.parametrize(("heads", "window"), CASES, ids=str)
def test_is_its_reference(open_ops, rng, heads, window):
    cache = paged_cache(rng, heads, LENGTHS, [max(0, n - window) for n in LENGTHS])
    q = normal(rng, (len(LENGTHS), heads.num_heads, heads.head_dim), heads.dtype)
    out = decoded(open_ops(heads.dtype, heads.kv_dtype), q, cache, heads.head_dim**-0.5, window)
    assert_close(out, expected(q, cache, heads.head_dim**-0.5, window), heads.dtype)
    assert not out[0].any()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("length", [129, 2000, 5000])
def test_a_split_sequence_is_combined_alike_every_time(open_ops, rng, dtype, length, in_fp8):
    heads = Heads(dtype, 128, 4, 2, 16, in_fp8)
    cache = paged_cache(rng, heads, [length], [0])
    q = normal(rng, (1, heads.num_heads, heads.head_dim), dtype, scale=3.0)
    runs = [decoded(open_ops(dtype, heads.kv_dtype), q, cache, 0.1, NO_WINDOW) for _ in range(3)]
    assert_close(runs[0], expected(q, cache, 0.1, NO_WINDOW), dtype)
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@pytest.mark.parametrize(("dtype", "in_fp8"), [("bfloat16", False), ("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("window", [NO_WINDOW, 3000])
@pytest.mark.parametrize("long_at", [0, 20, 39])
def test_long_sequences_among_short_ones(open_ops, rng, dtype, in_fp8, window, long_at):
    heads = Heads(dtype, 128, 4, 2, 16, in_fp8)
    lengths = [int(n) for n in rng.integers(0, 90, 40)]
    lengths[long_at], lengths[long_at // 2] = 9001, 3500
    cache = paged_cache(rng, heads, lengths, [max(0, n - window) for n in lengths])
    q = normal(rng, (len(lengths), heads.num_heads, heads.head_dim), dtype)
    out = decoded(open_ops(dtype, heads.kv_dtype), q, cache, 0.1, window)
    assert_close(out, expected(q, cache, 0.1, window), dtype)


GROUPED = [
    Heads("bfloat16", 128, 4, 2, 16),
    Heads("bfloat16", 128, 8, 1, 8),
    Heads("bfloat16", 128, 20, 1, 16),
    Heads("bfloat16", 128, 7, 1, 32),
    Heads("bfloat16", 64, 1, 2, 16),
    Heads("bfloat16", 256, 2, 1, 16),
    Heads("float16", 96, 3, 2, 16),
    Heads("float32", 64, 4, 2, 16),
    Heads("bfloat16", 128, 4, 2, 16, in_fp8=True),
    Heads("bfloat16", 128, 20, 1, 8, in_fp8=True),
    Heads("float16", 64, 7, 1, 16, in_fp8=True),
    Heads("float16", 256, 2, 1, 16, in_fp8=True),
    Heads("float32", 64, 4, 2, 16, in_fp8=True),
]
FAMILIES = [(11, 300), (2, 1500), (1, 700), (9, 40), (3, 513)]
"""Sequences, and tokens that they begin with together."""


def with_families(rng: np.random.Generator, heads: Heads) -> PagedCache:
    """A cache in which sequences begin alike, in random order; a third of them go on for long."""
    starts, lengths = [], []
    for count, num_common in FAMILIES:
        starts += [(len(lengths), num_common // heads.block_size)] * count
        lengths += (num_common + rng.integers(1, 90, count) + 500 * rng.integers(0, 3, count)).tolist()
    cache = paged_cache(rng, heads, lengths, [0] * len(lengths))
    for table, (leader, num_blocks) in zip(cache.block_tables, starts, strict=True):
        table[:num_blocks] = cache.block_tables[leader, :num_blocks]
    order = rng.permutation(len(lengths))
    tables, lens = cache.block_tables[order].copy(), cache.context_lens[order].copy()
    return PagedCache(cache.kv, tables, lens, cache.kv_scales)


@pytest.mark.parametrize("heads", GROUPED, ids=str)
def test_what_sequences_begin_with_together_counts_for_each(open_ops, rng, heads):
    ops, cache = open_ops(heads.dtype, heads.kv_dtype), with_families(rng, heads)
    q = normal(rng, (len(cache.context_lens), heads.num_heads, heads.head_dim), heads.dtype, scale=2.0)
    wanted = expected(q, cache, heads.head_dim**-0.5, NO_WINDOW)
    runs = [decoded(ops, q, cache, heads.head_dim**-0.5, NO_WINDOW) for _ in range(3)]
    assert_close(runs[0], wanted, heads.dtype)
    for row in range(len(q)):
        assert_close(runs[0][row], wanted[row], heads.dtype)
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_block_that_does_not_exist_reads_as_zeros(open_ops, rng, dtype, in_fp8):
    heads = Heads(dtype, 64, 4, 2, 8, in_fp8)
    cache = paged_cache(rng, heads, [50, 300], [0, 0])
    q = normal(rng, (2, heads.num_heads, heads.head_dim), dtype)
    zeros = cache.block_tables[0, 3], cache.block_tables[1, 10]
    cache.kv[zeros, LAYER] = 0
    wanted = expected(q, cache, 0.125, NO_WINDOW)
    cache.kv[zeros, LAYER] = heads.nan
    cache.block_tables[0, 3], cache.block_tables[1, 10] = len(cache.kv), -1
    assert_close(decoded(open_ops(dtype, heads.kv_dtype), q, cache, 0.125, NO_WINDOW), wanted, dtype)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_a_nan_in_the_cache_reaches_the_heads_that_see_it_and_no_other(open_ops, rng, side, in_fp8):
    heads = Heads("bfloat16", 128, 4, 2, 16, in_fp8)
    cache = paged_cache(rng, heads, [100, 100], [0, 0])
    cache.kv[cache.block_tables[0, 2], LAYER, side, 1, 5] = heads.nan
    q = normal(rng, (2, heads.num_heads, heads.head_dim), "bfloat16")
    out = decoded(open_ops("bfloat16", heads.kv_dtype), q, cache, 0.1, NO_WINDOW)
    assert np.isnan(out[0, 4:].astype(np.float32)).all()
    assert np.isfinite(out[0, :4].astype(np.float32)).all()
    assert np.isfinite(out[1].astype(np.float32)).all()


def test_a_captured_graph_serves_other_lengths(open_ops, rng):
    ops, heads, window = open_ops("bfloat16"), Heads("bfloat16", 128, 4, 2, 16), 700
    cache = paged_cache(rng, heads, [900, 40, 333], [0, 0, 0])
    q = normal(rng, (3, heads.num_heads, heads.head_dim), "bfloat16")
    out, lens = poisoned(ops, q), ops.upload(cache.context_lens)
    batch = AttentionBatch(ops.upload(cache.kv), LAYER, ops.upload(cache.block_tables), lens, 0.1, window)
    queries = ops.upload(q)
    replay = captured(ops, [lambda: ops.paged_decode_attention(queries, batch, out)])
    for lengths in ([900, 40, 333], [1, 0, 300], [600, 39, 0]):
        now = PagedCache(cache.kv, cache.block_tables, np.array(lengths, np.int32))
        with ops.stream:
            lens.set(now.context_lens)
        replay()
        assert_close(ops.download(out), expected(q, now, 0.1, window), "bfloat16")


@pytest.mark.parametrize("size", [1e-30, 3e-6, 1.0, 1e20])
def test_queries_of_any_size_meet_an_e4m3_cache(open_ops, rng, size):
    """Scores are as large as ever: the scale of the softmax makes up for the queries' size."""
    heads = Heads("bfloat16", 128, 4, 2, 16, in_fp8=True)
    cache = paged_cache(rng, heads, [300, 17], [0, 0])
    q = normal(rng, (2, heads.num_heads, heads.head_dim), "bfloat16", scale=size)
    out = decoded(open_ops("bfloat16", heads.kv_dtype), q, cache, 0.1 / size, NO_WINDOW)
    assert_close(out, expected(q, cache, 0.1 / size, NO_WINDOW), "bfloat16")


def test_no_sequences_are_no_work(open_ops, rng):
    ops, heads = open_ops("bfloat16"), Heads("bfloat16", 128, 4, 2, 16)
    cache = paged_cache(rng, heads, [16], [0])
    q = ops.upload(np.empty((0, heads.num_heads, heads.head_dim), NUMPY_DTYPES["bfloat16"]))
    tables, lens = ops.upload(cache.block_tables[:0]), ops.upload(cache.context_lens[:0])
    ops.paged_decode_attention(q, AttentionBatch(ops.upload(cache.kv), LAYER, tables, lens, 0.1), q)
    ops.synchronize()


@pytest.mark.parametrize(("num_sequences", "group"), [(64, 64), (256, 8), (512, 512), (64, 1)])
def test_speed_of_what_is_common(open_ops, rng, num_sequences, group):
    """Sequences with 2,048 common and 96 own tokens; those of the last case share nothing."""
    open_ops("bfloat16")
    ops = importlib.import_module("model.ops.gpu.ops").CudaOps(NUMPY_DTYPES["bfloat16"])
    heads, num_common, num_layers = Heads("bfloat16", 128, 4, 8, 16), 128, 2
    tables = np.empty((num_sequences, num_common + 6), np.int32)
    num_blocks = num_sequences // group * num_common + num_sequences * 6
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables[:, num_common:] = ids[: num_sequences * 6].reshape(num_sequences, 6)
    tables[:, :num_common] = np.repeat(ids[num_sequences * 6 :].reshape(-1, num_common), group, axis=0)
    kv = large_cache(ops, num_blocks, num_layers, heads)
    shape = (num_sequences, heads.num_heads, heads.head_dim)
    q, out = ops.upload(normal(rng, shape, "bfloat16")), ops.empty(shape, ops.dtype)
    arrays = ops.upload(tables), ops.upload(np.full(num_sequences, (num_common + 6) * 16, np.int32))
    with ops.scratch():
        plan = ops.plan_decode_attention(heads.num_heads, AttentionBatch(kv, 0, *arrays))
        batches = [AttentionBatch(kv, layer, *arrays, 0.088, plan=plan) for layer in range(num_layers)]
        launches = [lambda batch=batch: ops.paged_decode_attention(q, batch, out) for batch in batches]
        seconds = seconds_of(ops, [captured(ops, launches)] * 8) / num_layers
    num_bytes = num_blocks * (kv.nbytes // len(kv)) // num_layers
    what = f"paged_decode {num_sequences} x 2,144, 2,048 in common by {group}"
    report_bandwidth(what, num_bytes, seconds)
    assert np.isfinite(ops.download(out).astype(np.float32)).all()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(
    ("lengths", "num_layers"),
    [([4096] * 32, 2), ([1024] * 128, 2), ([512] * 256, 2), ([32768], 8), ([4096] * 31 + [131072], 2)],
    ids=lambda value: f"{len(value)}_of_up_to_{max(value)}" if isinstance(value, list) else f"{value}_layers",
)
def test_speed(open_ops, rng, lengths, num_layers, in_fp8):
    open_ops("bfloat16")  # skips without a GPU
    heads = Heads("bfloat16", 128, 4, 8, 16, in_fp8)
    backend = importlib.import_module("model.ops.gpu.ops")
    ops = backend.CudaOps(NUMPY_DTYPES["bfloat16"], heads.kv_dtype)  # temporaries not poisoned
    blocks_of = [length // heads.block_size for length in lengths]
    kv = large_cache(ops, sum(blocks_of), num_layers, heads)
    tables = np.zeros((len(lengths), max(blocks_of)), np.int32)
    for row, ids in zip(tables, np.split(rng.permutation(sum(blocks_of)), np.cumsum(blocks_of)[:-1]), strict=True):
        row[: len(ids)] = ids
    scales = ops.upload(np.ones((num_layers, 2, heads.num_kv_heads), np.float32)) if in_fp8 else None
    shape = (len(lengths), heads.num_heads, heads.head_dim)
    q, out = ops.upload(normal(rng, shape, "bfloat16")), ops.empty(shape, ops.dtype)
    arrays = ops.upload(tables), ops.upload(np.array(lengths, np.int32))
    batches = [AttentionBatch(kv, layer, *arrays, 0.088, kv_scales=scales) for layer in range(num_layers)]
    launches = [lambda batch=batch: ops.paged_decode_attention(q, batch, out) for batch in batches]
    seconds = seconds_of(ops, [captured(ops, launches)] * 8) / num_layers  # eight, to hide the first one's launch
    what = f"paged_decode {heads.kv_dtype} {len(lengths)} x up to {max(lengths)}"
    report_bandwidth(what, kv.nbytes // num_layers, seconds)
    assert np.isfinite(ops.download(out).astype(np.float32)).all()

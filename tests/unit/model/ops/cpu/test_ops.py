"""The specification itself, against formulas written out plainly in float64. Sampling has a file of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.dtypes import NUMPY_DTYPES
from model.ops.cpu.ops import DECODE_GROUP, NumpyOps
from model.ops.fp8 import E4M3, narrow, widen
from model.ops.interface import NO_WINDOW, AttentionBatch, HeadRotation
from model.ops.weight import Weight

OPS = NumpyOps()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_what_crosses_the_border_is_a_copy(rng):
    host = normal(rng, 3, 4)
    there = OPS.upload(host)
    back = OPS.download(there)
    there[:] = 0
    assert (back == host).all()
    assert host.any()
    free, total = OPS.memory_bytes()
    assert 0 < free <= total


def test_gather_rows(rng):
    table = normal(rng, 10, 4)
    rows = OPS.gather_rows(table, np.array([3, 9, 0, 10, -1, 2**31 - 1], np.int32))
    np.testing.assert_array_equal(rows[:3], table[[3, 9, 0]])
    assert not rows[3:].any()


@pytest.mark.parametrize(("name", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 1e-2)])
def test_norms(rng, name: str, tolerance: float):
    dtype = NUMPY_DTYPES[name]
    ops = NumpyOps(dtype)
    x, residual = normal(rng, 5, 64).astype(dtype), normal(rng, 5, 64).astype(dtype)
    weight = normal(rng, 64).astype(dtype)
    total = (residual.astype(np.float32) + x.astype(np.float32)).astype(dtype)
    exact = total.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight.astype(np.float64)
    out = np.empty_like(x)
    returned = ops.add_rms_norm(x, residual, weight, 1e-5, out)
    assert returned is out
    assert out.dtype == dtype
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(ops.rms_norm(total, weight, 1e-5), out)


def test_linear(rng):
    x, weight, bias = normal(rng, 5, 16), normal(rng, 7, 16), normal(rng, 7)
    np.testing.assert_allclose(OPS.linear(x, Weight(weight)), x @ weight.T, rtol=1e-5)
    np.testing.assert_allclose(OPS.linear(x, Weight(weight), bias), x @ weight.T + bias, rtol=1e-4, atol=1e-5)
    half = NumpyOps(NUMPY_DTYPES["bfloat16"])
    x16, weight16 = x.astype(half.dtype), weight.astype(half.dtype)
    assert half.linear(x16, Weight(weight16)).dtype == half.dtype
    logits = half.linear(x16, Weight(weight16), dtype=np.dtype(np.float32))
    np.testing.assert_allclose(logits, x16.astype(np.float32) @ weight16.astype(np.float32).T, rtol=1e-5)


def test_silu_mul_even_far_out():
    gate_up = np.array([[0.0, 1.0, -1.0, 100.0, -1000.0, 3e38, 2.0, 2.0, 2.0, 2.0, 2.0, 0.5]], np.float32)
    expected = [0, 2 / (1 + np.exp(-1)), -2 / (1 + np.exp(1)), 200, 0, 1.5e38]
    np.testing.assert_allclose(OPS.silu_mul(gate_up)[0], expected, rtol=1e-6, atol=1e-30)


def test_copy_blocks(rng):
    kv = normal(rng, 6, 2, 2, 1, 4, 8)
    before = kv.copy()
    OPS.copy_blocks(kv, np.array([0, 1, 6, 2, -1], np.int32), np.array([4, 3, 5, 6, 5], np.int32))
    np.testing.assert_array_equal(kv[4], before[0])
    np.testing.assert_array_equal(kv[3], before[1])
    np.testing.assert_array_equal(kv[[0, 1, 2, 5]], before[[0, 1, 2, 5]])


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_kv_write(rng, with_norm: bool):
    num_heads, num_kv_heads, head_dim, block_size = 4, 2, 8, 4
    qkv = normal(rng, 5, (num_heads + 2 * num_kv_heads) * head_dim)
    original = qkv.copy()
    cos, sin = normal(rng, 10, head_dim // 2), normal(rng, 10, head_dim // 2)
    positions = np.array([3, 0, 9, 10, -1], np.int32)
    slots = np.array([7, 2, 3 * block_size, 1, 0], np.int64)  # the third is beyond the cache
    kv = np.full((3, 2, 2, num_kv_heads, block_size, head_dim), np.nan, np.float32)
    q_norm, k_norm = (normal(rng, head_dim), normal(rng, head_dim)) if with_norm else (None, None)
    q = OPS.rope_kv_write(qkv, HeadRotation(cos, sin, q_norm, k_norm, 1e-5), positions, slots, kv, 1)

    def expected(row: int, head: int, weight: np.ndarray | None) -> np.ndarray:
        x = original[row, head * head_dim : (head + 1) * head_dim].astype(np.float64)
        if weight is not None:
            x = x / np.sqrt((x**2).mean() + 1e-5) * weight
        pairs = x[: head_dim // 2] + 1j * x[head_dim // 2 :]
        turned = pairs * (cos[positions[row]] + 1j * sin[positions[row]])
        return np.concatenate([turned.real, turned.imag])

    for row in range(3):
        for head in range(num_heads):
            np.testing.assert_allclose(q[row, head], expected(row, head, q_norm), rtol=1e-4, atol=1e-5)
    assert not q[3:].any()
    for row in range(2):
        block, offset = divmod(int(slots[row]), block_size)
        for head in range(num_kv_heads):
            k = expected(row, num_heads + head, k_norm)
            np.testing.assert_allclose(kv[block, 1, 0, head, offset], k, rtol=1e-4, atol=1e-5)
            v = original[row, (num_heads + num_kv_heads + head) * head_dim :][:head_dim]
            np.testing.assert_array_equal(kv[block, 1, 1, head, offset], v)
    assert np.count_nonzero(~np.isnan(kv)) == 2 * 2 * num_kv_heads * head_dim
    np.testing.assert_array_equal(qkv, original)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_rope_kv_write_in_e4m3(rng, name: str):
    """Each head by its own scale, of the activations' dtype first; NaN and what is too large have bits of their own."""
    ops, num_tokens, head_dim, block_size = NumpyOps(NUMPY_DTYPES[name], np.dtype(np.uint8)), 3, 8, 4
    qkv = normal(rng, num_tokens, (2 + 2 * 2) * head_dim).astype(ops.dtype)
    values = qkv.reshape(num_tokens, 6, head_dim)[:, 4:]
    values[0, 0, :4] = np.nan, np.inf, -np.inf, 1e5
    scales = rng.uniform(0.01, 2, (2, 2, 2)).astype(np.float32)
    positions, slots = np.arange(num_tokens, dtype=np.int32), np.array([1, 6, 7])
    cos, sin = np.cos(np.ones((4, 4), np.float32)), np.sin(np.ones((4, 4), np.float32))
    wide = np.zeros((2, 2, 2, 2, block_size, head_dim), ops.dtype)
    kv = np.full(wide.shape, 0xAA, np.uint8)
    rotation = HeadRotation(cos, sin)
    q = ops.rope_kv_write(qkv, rotation, positions, slots, wide, 1)
    np.testing.assert_array_equal(ops.rope_kv_write(qkv, rotation, positions, slots, kv, 1, scales), q)
    blocks, offsets = np.divmod(slots, block_size)
    for side in (0, 1):
        exact = wide[blocks, 1, side, :, offsets].astype(np.float32) / scales[1, side, :, None]
        stored = kv[blocks, 1, side, :, offsets]
        finite = np.isfinite(exact) & (np.abs(exact) < 448)
        np.testing.assert_array_equal(stored[finite], exact[finite].astype(E4M3).view(np.uint8))
    assert kv[0, 1, 1, 0, 1, :4].tolist() == [0x7F, 0x7E, 0xFE, 0x7E]
    assert np.count_nonzero(kv != 0xAA) <= 2 * num_tokens * 2 * head_dim


@pytest.mark.parametrize("is_decode", [False, True])
def test_attention_reads_e4m3_times_the_head_s_scale(rng, is_decode: bool):
    case = PagedCase(rng, [40, 9, 33], 8)
    scales = rng.uniform(0.005, 0.02, (2, 2, 2)).astype(np.float32)
    stored = narrow(case.kv / scales[None, :, :, :, None, None])
    wide = widen(stored) * scales[None, :, :, :, None, None]
    starts = np.array([0, 5, 6, 20], np.int32)
    q = normal(rng, 3 if is_decode else 20, 4, case.head_dim)
    outs = []
    for kv, kv_scales in ((stored, scales), (wide, None)):
        batch = AttentionBatch(kv, 1, case.tables, case.lengths, 0.3, query_start=starts, kv_scales=kv_scales)
        outs.append(np.empty_like(q))
        (OPS.paged_decode_attention if is_decode else OPS.paged_prefill_attention)(q, batch, outs[-1])
    assert np.isfinite(outs[0]).all()
    np.testing.assert_array_equal(*outs)


class PagedCase:
    """Random keys and values of some sequences, dense and in a cache whose other slots hold NaN."""

    def __init__(self, rng: np.random.Generator, lengths: list[int], block_size: int):
        self.num_kv_heads, self.head_dim, self.layer = 2, 16, 1
        width = -(-max(lengths, default=1) // block_size) + 1
        self.tables = rng.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
        self.lengths = np.array(lengths, np.int32)
        self.kv = np.full((self.tables.size, 2, 2, self.num_kv_heads, block_size, self.head_dim), np.nan, np.float32)
        self.dense = [normal(rng, 2, self.num_kv_heads, length, self.head_dim) for length in lengths]
        for table, dense in zip(self.tables, self.dense, strict=True):
            for at in range(dense.shape[2]):
                self.kv[table[at // block_size], self.layer, :, :, at % block_size] = dense[:, :, at]

    def batch(self, scale: float, window: int, *chunks) -> AttentionBatch:
        return AttentionBatch(self.kv, self.layer, self.tables, self.lengths, scale, window, *chunks)

    def naive(self, s: int, query: np.ndarray, at: int, scale: float, window: int) -> np.ndarray:
        """query [Hq, D] at position `at` of sequence s -> [Hq, D], in float64."""
        first = max(0, at + 1 - window)
        out = []
        for head, row in enumerate(query.astype(np.float64)):
            keys, values = self.dense[s][:, head // (len(query) // self.num_kv_heads), first : at + 1]
            scores = keys @ row * scale
            weights = np.exp(scores - scores.max())
            out.append(weights @ values / weights.sum())
        return np.array(out)


WINDOWS = [NO_WINDOW, 1, 5, 16, 33]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("num_heads", [2, 6])
def test_decode_attention(rng, window: int, block_size: int, num_heads: int):
    lengths = [0, 1, 70, 8, 0, 33, *range(2, 2 + DECODE_GROUP)]
    case = PagedCase(rng, lengths, block_size)
    q = normal(rng, len(lengths), num_heads, case.head_dim)
    out = np.full_like(q, np.nan)
    OPS.paged_decode_attention(q, case.batch(0.3, window), out)
    for s, length in enumerate(lengths):
        expected = case.naive(s, q[s], length - 1, 0.3, window) if length else np.zeros_like(q[s])
        np.testing.assert_allclose(out[s], expected, rtol=1e-4, atol=1e-5)


def test_a_row_rounded_to_8_bits_has_the_same_bits_in_any_batch(rng):
    x, data = normal(rng, 70, 640), narrow(100 * normal(rng, 256, 640))
    weight = Weight.fp8(data, rng.uniform(0.01, 1, 256).astype(np.float32))
    whole = OPS.linear(OPS.quantise_rows(x), weight)
    for first, num_rows in ((0, 1), (5, 1), (3, 2), (1, 7), (6, 64)):
        rows = slice(first, first + num_rows)
        np.testing.assert_array_equal(OPS.linear(OPS.quantise_rows(x[rows]), weight), whole[rows])

    case, q = PagedCase(rng, [90, 40, 7], 8), normal(rng, 40, 4, 16)
    prompt = replace(case.batch(0.3, NO_WINDOW, np.array([0, 0, 40, 40], np.int32)), rounds_output=True)
    at_once, one_by_one = np.zeros_like(q), np.zeros_like(q)
    OPS.paged_prefill_attention(q, prompt, at_once)
    for at in range(len(q)):
        decodes = replace(prompt, query_start=None, context_lens=np.array([90, at + 1, 7], np.int32))
        out = np.empty((3, *q.shape[1:]), np.float32)
        OPS.paged_decode_attention(q[[0, at, 1]], decodes, out)
        one_by_one[at] = out[1]
    np.testing.assert_array_equal(at_once, one_by_one)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prefill_attention(rng, window: int, block_size: int):
    lengths, chunks = [40, 9, 33, 64], [40, 3, 1, 17]
    case = PagedCase(rng, lengths, block_size)
    starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    q = normal(rng, sum(chunks), 4, case.head_dim)
    out = np.full_like(q, np.nan)
    OPS.paged_prefill_attention(q, case.batch(0.3, window, starts, max(chunks)), out)
    for s, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
        for i in range(chunk):
            row = starts[s] + i
            expected = case.naive(s, q[row], length - chunk + i, 0.3, window)
            np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("half", [0, 1, slice(2)])
def test_a_broken_number_in_the_cache_reaches_the_rows_that_see_it_and_no_other(rng, half, broken, window: int):
    case, chunk, bad = PagedCase(rng, [50, 50], 8), 30, 37
    q = normal(rng, 2 * chunk, 4, case.head_dim)
    starts = np.array([0, chunk, 2 * chunk], np.int32)

    def prefilled() -> np.ndarray:
        out = np.empty_like(q)
        OPS.paged_prefill_attention(q, case.batch(0.3, window, starts, chunk), out)
        return out

    clean = prefilled()
    case.kv[case.tables[0, bad // 8], case.layer, half, 1, bad % 8] = broken  # of the second kv head
    out, at = prefilled(), np.arange(50 - chunk, 50)
    sees = np.zeros(2 * chunk, bool)
    sees[:chunk] = (at >= bad) & (at < bad + window)
    assert 0 < np.count_nonzero(sees) < chunk
    assert not np.isfinite(out[sees, 2:]).all(axis=-1).any()
    np.testing.assert_allclose(out[:, :2], clean[:, :2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[~sees], clean[~sees], rtol=1e-5, atol=1e-6)


def test_attention_survives_large_scores(rng):
    case = PagedCase(rng, [20], 8)
    q, out = normal(rng, 1, 2, 16), np.empty((1, 2, 16), np.float32)
    OPS.paged_decode_attention(q, case.batch(1e4, NO_WINDOW), out)
    np.testing.assert_allclose(out[0], case.naive(0, q[0], 19, 1e4, NO_WINDOW), rtol=1e-3, atol=1e-4)


def test_find_nonfinite_sets_its_mark_and_no_other():
    ops, found = NumpyOps(), np.zeros(3, np.int32)
    for index, x in enumerate(([[1.0, -2.0]], [[1.0, np.inf]], [[np.nan, 0.0]])):
        ops.find_nonfinite(np.array(x, np.float32), found[index : index + 1])
    np.testing.assert_array_equal(found, [0, 1, 1])


def test_find_nonfinite_finds_nan_among_bits_of_e4m3():
    ops = NumpyOps()
    for bits in range(256):
        found = np.zeros(1, np.int32)
        ops.find_nonfinite(np.array([[0x7E, bits, 0xFE]], np.uint8), found)
        assert found[0] == (bits in (0x7F, 0xFF))

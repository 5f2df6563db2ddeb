"""Rotation, cache write and attention as one kernel: the bits of one kernel after another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from model.ops.attention import rope_decode_attention
from model.ops.cpu.ops import NumpyOps
from model.ops.gpu.attention.rotated_decode import can_rotate, rotate_and_decode
from model.ops.interface import NO_WINDOW, AttentionBatch, HeadRotation
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close, normal
from tests.support.paged_cache import LAYER, Heads, PagedCache, paged_cache

pytestmark = pytest.mark.gpu

LENGTHS = [1000, 0, 1, 16, 17, 129, 333, 64]
CASES = [
    (Heads("bfloat16", 128, 4, 8, 16), NO_WINDOW),
    (Heads("bfloat16", 128, 8, 4, 16), 100),
    (Heads("bfloat16", 128, 20, 1, 16), 300),
    (Heads("bfloat16", 128, 7, 1, 32), NO_WINDOW),
    (Heads("bfloat16", 64, 1, 2, 8), NO_WINDOW),
    (Heads("bfloat16", 96, 3, 2, 8), 33),
    (Heads("bfloat16", 256, 2, 2, 16), NO_WINDOW),
    (Heads("float16", 128, 4, 2, 32), 17),
    (Heads("float16", 80, 8, 1, 32), NO_WINDOW),
    (Heads("bfloat16", 128, 4, 8, 16, in_fp8=True), NO_WINDOW),
    (Heads("bfloat16", 128, 16, 1, 16, in_fp8=True), 100),
    (Heads("bfloat16", 64, 5, 2, 8, in_fp8=True), NO_WINDOW),
    (Heads("bfloat16", 256, 2, 2, 32, in_fp8=True), 500),
    (Heads("float16", 80, 8, 1, 16, in_fp8=True), NO_WINDOW),
]


@dataclass
class Case:
    """Rows that are the last tokens of their sequences."""

    heads: Heads
    cache: PagedCache
    rng: np.random.Generator
    with_norms: bool
    window: int = NO_WINDOW

    def __post_init__(self):
        heads, lens = self.heads, self.cache.context_lens
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self.qkv = normal(self.rng, (len(lens), width), heads.dtype)
        angles = self.rng.uniform(0, 6, (max(1, int(lens.max())), heads.head_dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.positions = np.maximum(lens - 1, 0).astype(np.int32)
        blocks = self.cache.known_tables()[np.arange(len(lens)), self.positions // heads.block_size]
        slots = blocks.astype(np.int64) * heads.block_size + self.positions % heads.block_size
        num_slots = len(self.cache.kv) * heads.block_size
        self.slots = np.where(lens > 0, slots, num_slots)
        block, offset = np.divmod(self.slots[lens > 0], heads.block_size)
        self.cache.kv[block, LAYER, :, :, offset] = heads.nan  # not written yet
        self.norms = [normal(self.rng, (heads.head_dim,), heads.dtype) if self.with_norms else None for _ in range(2)]

    def arrays(self, ops):
        """Return the arguments of the op on the device."""

        def on_device(array):
            return None if array is None else ops.upload(array)

        tables = self.cache.known_tables() if isinstance(ops, NumpyOps) else self.cache.block_tables
        rotation = HeadRotation(*map(on_device, (self.cos, self.sin, *self.norms)), 1e-6)
        kv, lens, scales = map(on_device, (self.cache.kv.copy(), self.cache.context_lens, self.cache.kv_scales))
        scale = self.heads.head_dim**-0.5
        batch = AttentionBatch(kv, LAYER, on_device(tables), lens, scale, self.window, kv_scales=scales)
        return on_device(self.qkv), rotation, (on_device(self.positions), on_device(self.slots)), batch


def bits(ops, out, batch) -> list[np.ndarray]:
    """Return result and cache."""
    return [ops.download(array).view(np.uint8) for array in (out, batch.kv)]


def check_bits(ops, case: Case, num_runs: int = 3) -> None:
    with ops.scratch():
        qkv, rotation, at, batch = case.arrays(ops)
        assert can_rotate(ops, qkv, batch)
        wanted = bits(ops, rope_decode_attention(ops, qkv, rotation, at, batch), batch)
        for _ in range(num_runs):
            batch = replace(batch, kv=ops.upload(case.cache.kv))
            found = bits(ops, rotate_and_decode(ops, qkv, rotation, at, batch), batch)
            for each, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(each, other)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "window"), CASES, ids=str)
def test_has_the_bits_of_one_kernel_after_another(open_ops, rng, heads, window, with_norms):
    cache = paged_cache(rng, heads, LENGTHS, [max(0, n - window) for n in LENGTHS])
    check_bits(open_ops(heads.dtype, heads.kv_dtype), Case(heads, cache, rng, with_norms, window))


@pytest.mark.parametrize(("heads", "window"), CASES[:3] + CASES[9:11], ids=str)
def test_is_its_reference(open_ops, rng, heads, window):
    cache = paged_cache(rng, heads, LENGTHS, [max(0, n - window) for n in LENGTHS])
    case, ops = Case(heads, cache, rng, True, window), open_ops(heads.dtype, heads.kv_dtype)
    reference, results = NumpyOps(NUMPY_DTYPES[heads.dtype], heads.kv_dtype), []
    for each, run in ((ops, rotate_and_decode), (reference, rope_decode_attention)):
        with each.scratch():
            qkv, rotation, at, batch = case.arrays(each)
            results.append(each.download(run(each, qkv, rotation, at, batch)))
    assert_close(results[0], results[1], heads.dtype)
    assert not results[0][1].any()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(("group", "num_kv_heads"), [(4, 8), (8, 4)])
@pytest.mark.parametrize("length", [0, 1, 128, 129, 1100, 5000, 20000])
def test_one_sequence_of_any_length(open_ops, rng, length, group, num_kv_heads, in_fp8):
    heads = Heads("bfloat16", 128, group, num_kv_heads, 16, in_fp8)
    case = Case(heads, paged_cache(rng, heads, [length], [0]), rng, group == 8)
    check_bits(open_ops("bfloat16", heads.kv_dtype), case, num_runs=5)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_what_sequences_begin_with_together_is_read_once(open_ops, rng, in_fp8):
    heads = Heads("bfloat16", 128, 4, 8, 16, in_fp8)
    cache = paged_cache(rng, heads, [int(n) for n in rng.integers(700, 2500, 11)], [0] * 11)
    cache.block_tables[:9, :40] = cache.block_tables[0, :40]
    check_bits(open_ops("bfloat16", heads.kv_dtype), Case(heads, cache, rng, False))


def test_16_sequences_of_different_lengths(open_ops, rng):
    heads = Heads("bfloat16", 128, 4, 8, 16, in_fp8=True)
    lengths = [int(n) for n in rng.integers(0, 300, 16)]
    lengths[3], lengths[11] = 9001, 3500
    case = Case(heads, paged_cache(rng, heads, lengths, [0] * 16), rng, False)
    check_bits(open_ops("bfloat16", heads.kv_dtype), case)


def test_a_captured_graph_serves_other_lengths(open_ops, rng):
    """Its launches follow one another as in a layer."""
    heads = Heads("bfloat16", 128, 4, 8, 16)
    ops, cache = open_ops("bfloat16"), paged_cache(rng, heads, [900, 40, 333], [0] * 3)
    first = Case(heads, replace(cache, kv=cache.kv.copy()), rng, False)
    qkv, rotation, at, batch = first.arrays(ops)
    outs = [ops.empty((3, heads.num_heads * heads.head_dim), ops.dtype) for _ in range(4)]

    def work():
        with ops.scratch():
            planned = replace(batch, plan=ops.plan_decode_attention(heads.num_heads, batch))
            ops.rms_norm(outs[0], weight, 1e-6)
            for out in outs:
                rows = rotate_and_decode(ops, qkv, rotation, at, planned)
                ops.add_rms_norm(rows, out, weight, 1e-6, normed)

    weight, normed = ops.upload(np.ones(outs[0].shape[1], ops.dtype)), ops.empty(outs[0].shape, ops.dtype)
    ops.is_poisoning = False
    replay = ops.capture(work)
    ops.is_poisoning = True
    for lengths in ([900, 40, 333], [1, 0, 300], [600, 39, 0]):
        now = replace(cache, kv=cache.kv.copy(), context_lens=np.array(lengths, np.int32))
        case = Case(heads, now, rng, False)
        arrays = batch.context_lens, batch.kv, qkv, *at
        values = now.context_lens, now.kv, case.qkv, case.positions, case.slots
        with ops.stream:
            for array, value in zip(arrays, values, strict=True):
                array.view(np.uint8).set(value.view(np.uint8))
            for out in outs:
                out.data.memset_async(0, out.nbytes, ops.stream)
        replay()
        found = [ops.download(out) for out in outs]
        with ops.scratch():
            wanted = ops.download(rope_decode_attention(ops, qkv, rotation, at, batch))
        for each in found:  # a sum with zeros
            np.testing.assert_array_equal(each.astype(np.float32), wanted.astype(np.float32))

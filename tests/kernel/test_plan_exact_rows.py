"""The plan of few decode rows: each has the splits of a batch of one, and attention gives it the bits of one."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.gpu.attention import split_decode
from model.ops.interface import NO_WINDOW, AttentionBatch
from tests.support.kernel_checks import normal, seconds_of
from tests.support.paged_cache import LAYER, Heads, PagedCache, captured, large_cache, paged_cache, poisoned

pytestmark = pytest.mark.gpu

SEQUENCE, FIRST, BEGIN, END, COUNT, FIRST_ROW, ROW, NUM_MEMBERS = range(8)
BLOCK_SIZE, KV_HEADS, HEADS = 16, 8, 32

DRAFTED = [
    [(1, 3)],
    [(127, 5)],
    [(300, 17)],
    [(4220, 8)],
    [(4000, 5), (1000, 3)],
    [(16000, 17)],
    [(513, 9), (40, 1), (700, 4), (12000, 2)],
    [(900, 1)] * 8,
    [(0, 1), (250, 9), (0, 1), (130, 1)],
]
"""Of each sequence the context of its first row, and its rows. A context of 0 is padding."""


def rows_of(drafted: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Sequence and context of each row."""
    rows = [(number, first + at) for number, (first, count) in enumerate(drafted) for at in range(count)]
    return [number for number, _ in rows], [length for _, length in rows]


def plan_of(ops, tables: np.ndarray, lengths: list[int], window: int, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """Splits int32[num_slots, 8], members int32[n, 4]."""
    lens = np.array(lengths, np.int32)
    kv = ops.empty((1, 1, 2, KV_HEADS, BLOCK_SIZE, 128), ops.dtype)
    batch = AttentionBatch(kv, 0, ops.upload(tables), ops.upload(lens), window=window, exact=exact)
    with ops.scratch():
        plan = ops.download(exact_plan(ops, batch) if exact else ops.plan_decode_attention(HEADS, batch))
    num_slots = split_decode(ops, HEADS, batch).num_slots
    return plan[:num_slots], plan[num_slots:].reshape(-1, 4)


def exact_plan(ops, batch: AttentionBatch):
    with ops.exact_rows():
        return ops.plan_decode_attention(HEADS, batch)


def ranges_of(plan: np.ndarray, members: np.ndarray, row: int) -> list[tuple[int, int, int]]:
    """(partial result, begin, end) of a row's splits, in order."""
    found = []
    for split in plan:
        if split[NUM_MEMBERS] and row in members[split[FIRST_ROW] :][: split[NUM_MEMBERS], 0]:
            found.append((split[ROW], split[BEGIN], split[END]))
        elif split[SEQUENCE] == row and not split[NUM_MEMBERS]:
            found.append((split[ROW] - split[FIRST_ROW], split[BEGIN], split[END]))
    return sorted(tuple(map(int, each)) for each in found)


@pytest.mark.parametrize("drafted", DRAFTED, ids=str)
@pytest.mark.parametrize("window", [NO_WINDOW, 200])
def test_each_row_has_the_splits_of_a_batch_of_one(open_ops, drafted, window):
    ops, (owners, lengths) = open_ops("bfloat16"), rows_of(drafted)
    width = 1024
    tables = np.arange(len(drafted) * width, dtype=np.int32).reshape(-1, width)[owners]
    plan, members = plan_of(ops, tables, lengths, window, True)
    used = plan[plan[:, SEQUENCE] < len(lengths)]
    np.testing.assert_array_equal(used, plan[: len(used)])
    for row, length in enumerate(lengths):
        alone, none = plan_of(ops, tables[[row]], [length], window, False)
        assert ranges_of(plan, members, row) == ranges_of(alone, none, 0)
    for split in used[used[:, NUM_MEMBERS] > 0]:
        group = members[split[FIRST_ROW] :][: split[NUM_MEMBERS]]
        assert len({owners[row] for row in group[:, 0]}) == 1
        for row, count, first_row, _ in group:
            own = used[(used[:, SEQUENCE] == row) & (used[:, NUM_MEMBERS] == 0)]
            assert (own[:, COUNT] == count).all()
            assert (own[:, FIRST_ROW] == first_row).all()


def test_rows_of_a_sequence_read_it_once(open_ops):
    ops, (owners, lengths) = open_ops("bfloat16"), rows_of([(4000, 8)])
    tables = np.arange(1024, dtype=np.int32)[None].repeat(len(owners), axis=0)
    plan, _ = plan_of(ops, tables, lengths, NO_WINDOW, True)
    used = plan[plan[:, SEQUENCE] < len(lengths)]
    assert (used[:, END] - used[:, BEGIN]).sum() < 4000 + 8 * 128


def test_more_splits_than_slots_are_cut_longer(open_ops):
    """Then rows differ from a batch of one, but nothing is left out."""
    ops, lengths = open_ops("bfloat16"), [16000] * 24
    tables = np.arange(24 * 1024, dtype=np.int32).reshape(24, 1024)
    plan, members = plan_of(ops, tables, lengths, NO_WINDOW, True)
    for row, length in enumerate(lengths):
        ranges = ranges_of(plan, members, row)
        assert [begin for _, begin, _ in ranges] == [0, *(end for *_, end in ranges[:-1])]
        assert ranges[-1][2] == length


CASES = [
    (Heads("bfloat16", 128, 4, 2, 16), NO_WINDOW),
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
@pytest.mark.parametrize("drafted", [[(1500, 5)], [(130, 9), (2300, 3), (0, 1)], [(4219, 17)]], ids=str)
def test_each_row_has_the_bits_of_a_batch_of_one(open_ops, rng, heads, window, drafted):
    ops, (owners, lengths) = open_ops(heads.dtype, heads.kv_dtype), rows_of(drafted)
    longest = [max(1, first + count - 1) for first, count in drafted]
    cache = paged_cache(rng, heads, longest, [0] * len(drafted))
    q = normal(rng, (len(lengths), heads.num_heads, heads.head_dim), heads.dtype, scale=2.0)
    tables, lens = cache.block_tables[owners], np.array(lengths, np.int32)
    together = decoded(ops, q, cache, tables, lens, window, exact=True)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decoded(ops, q[one], cache, tables[one], lens[one], window, exact=False)
        np.testing.assert_array_equal(together[one].view(np.uint8), alone.view(np.uint8))


def decoded(
    ops, q: np.ndarray, cache: PagedCache, tables: np.ndarray, lens: np.ndarray, window: int, *, exact: bool
) -> np.ndarray:
    out = poisoned(ops, q)
    with ops.scratch():
        scales = None if cache.kv_scales is None else ops.upload(cache.kv_scales)
        arrays = ops.upload(np.ascontiguousarray(tables)), ops.upload(lens)
        batch = AttentionBatch(ops.upload(cache.kv), LAYER, *arrays, 0.1, window, kv_scales=scales)
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

"""The plan of few decode rows: each has the splits of a batch of one."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.gpu.attention.paged import split_decode
from model.ops.interface import NO_WINDOW, AttentionBatch
from tests.support.paged_cache import drafted_rows

pytestmark = pytest.mark.gpu

SEQUENCE, FIRST, BEGIN, END, FIRST_NEW, FIRST_ROW, ROW, NUM_MEMBERS = range(8)  # of a split
MEMBER_COUNT, MEMBER_FIRST_ROW, MEMBER_END = range(1, 4)
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
"""Context of each sequence's first row, and its rows. A context of 0 is padding."""


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
    """(partial result, begin, end) of a row's splits in an exact plan, in order."""
    ends = members[row, MEMBER_END]
    has_row = (plan[:, FIRST_ROW] <= row) & (row < plan[:, FIRST_ROW] + plan[:, NUM_MEMBERS])
    return sorted((int(split[ROW]), int(split[BEGIN]), int(min(split[END], ends))) for split in plan[has_row])


def ranges_alone(plan: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (row, begin, end) of each split of a batch of one."""
    return sorted(tuple(map(int, (split[ROW], split[BEGIN], split[END]))) for split in plan if split[SEQUENCE] == 0)


def used_splits(plan: np.ndarray, num_rows: int) -> np.ndarray:
    """The splits up to the first unused one, where blocks stop."""
    is_unused = plan[:, SEQUENCE] >= num_rows
    return plan[: int(is_unused.argmax())] if is_unused.any() else plan


@pytest.mark.parametrize("drafted", [*DRAFTED, [(16000, 1)] * 24], ids=str)
@pytest.mark.parametrize("window", [NO_WINDOW, 200])
def test_each_row_has_the_splits_of_a_batch_of_one(open_ops, drafted, window):
    ops, (owners, lengths) = open_ops("bfloat16"), drafted_rows(drafted)
    width = 1024
    tables = np.arange(len(drafted) * width, dtype=np.int32).reshape(-1, width)[owners]
    plan, members = plan_of(ops, tables, lengths, window, True)
    used = used_splits(plan, len(lengths))
    results: list[int] = []
    for row, length in enumerate(lengths):
        alone = plan_of(ops, tables[[row]], [length], window, False)[0]
        assert ranges_of(used, members, row) == ranges_alone(alone)
        first = int(members[row, MEMBER_FIRST_ROW])
        results += range(first, first + int(members[row, MEMBER_COUNT]))
    assert sorted(results) == list(range(len(results)))
    for split in used:
        rows = range(split[FIRST_ROW], split[FIRST_ROW] + split[NUM_MEMBERS])
        assert {owners[row] for row in rows} == {owners[split[SEQUENCE]]}
        first_new = lengths[owners.index(owners[split[SEQUENCE]])] - 1
        assert split[END] <= split[BEGIN] or split[FIRST_NEW] <= first_new


@pytest.mark.parametrize(("num_rows", "most_reads"), [(8, 2), (17, 5)])
def test_rows_of_a_sequence_share_reads_of_a_long_context(open_ops, num_rows, most_reads):
    """Groups of four to six rows read it together, as their splits run at once."""
    ops, (owners, lengths) = open_ops("bfloat16"), drafted_rows([(4000, num_rows)])
    tables = np.arange(1024, dtype=np.int32)[None].repeat(len(owners), axis=0)
    used = used_splits(plan_of(ops, tables, lengths, NO_WINDOW, True)[0], len(lengths))
    assert (used[:, END] - used[:, BEGIN]).sum() <= most_reads * lengths[-1]

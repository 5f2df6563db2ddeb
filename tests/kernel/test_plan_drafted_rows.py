"""The plan of many decode rows, some of which are a token and its drafts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from model.ops.gpu.attention.paged import split_decode
from model.ops.interface import NO_WINDOW, AttentionBatch
from tests.kernel.test_plan_exact_rows import (
    BEGIN,
    END,
    FIRST_NEW,
    FIRST_ROW,
    HEADS,
    MEMBER_COUNT,
    MEMBER_END,
    MEMBER_FIRST_ROW,
    NUM_MEMBERS,
    ROW,
    SEQUENCE,
    used_splits,
)
from tests.support.paged_cache import drafted_rows

pytestmark = pytest.mark.gpu

BLOCK_SIZE, KV_HEADS, WIDTH = 16, 8, 512
MOST_MEMBERS = 6

DRAFTED = [
    [(300, 3)] * 16,
    [(350, 2)] * 64,
    [(4000, 5), (1000, 3), (20, 17), (0, 1), (1, 4)],
    [(8000, 17)] * 2,
    [(700, 1)] * 30 + [(700, 9)] + [(0, 1)] * 9,
    [(16 * number + 1, number % 17 + 1) for number in range(28)],
]
"""Context of each sequence's first row, and its rows. A context of 0 is padding."""


@pytest.mark.parametrize("drafted", DRAFTED, ids=lambda drafted: f"{drafted[:2]} of {len(drafted)}")
@pytest.mark.parametrize("window", [NO_WINDOW, 200])
def test_each_row_has_its_tokens_once(open_ops, drafted, window):
    ops, (owners, lengths) = open_ops("bfloat16"), drafted_rows(drafted)
    tables = np.arange(len(drafted) * WIDTH, dtype=np.int32).reshape(-1, WIDTH)[owners]
    kv = ops.empty((1, 1, 2, KV_HEADS, BLOCK_SIZE, 128), ops.dtype)
    arrays = ops.upload(tables), ops.upload(np.array(lengths, np.int32))
    batch = AttentionBatch(kv, 0, *arrays, window=window, drafted=True)
    with ops.scratch():
        plan = ops.download(ops.plan_decode_attention(HEADS, batch))
    split = split_decode(ops, HEADS, batch)
    used, members = used_splits(plan[: split.num_slots], len(lengths)), plan[split.num_slots :].reshape(-1, 4)
    results: list[int] = []
    for row, length in enumerate(lengths):
        has_row = (used[:, FIRST_ROW] <= row) & (row < used[:, FIRST_ROW] + used[:, NUM_MEMBERS])
        assert members[row, MEMBER_END] == length
        assert used[has_row, ROW].tolist() == [*range(members[row, MEMBER_COUNT])]
        ranges = [(begin, min(end, length)) for begin, end in used[has_row][:, [BEGIN, END]].tolist()]
        assert ranges[0][0] <= max(0, length - window)
        assert ranges[-1][1] == length
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
        first = int(members[row, MEMBER_FIRST_ROW])
        results += range(first, first + int(members[row, MEMBER_COUNT]))
    assert sorted(results) == list(range(len(results)))
    assert len(results) <= split.num_rows
    for one in used:
        rows = range(one[FIRST_ROW], one[FIRST_ROW] + one[NUM_MEMBERS])
        assert len(rows) <= MOST_MEMBERS
        assert {owners[row] for row in rows} == {owners[one[SEQUENCE]]}
        first_new = lengths[owners.index(owners[one[SEQUENCE]])] - 1
        assert one[END] <= one[BEGIN] or one[FIRST_NEW] <= max(0, first_new)
    if window == NO_WINDOW:
        num_read = sum(-(-count // MOST_MEMBERS) * first for first, count in drafted)
        assert (used[:, END] - used[:, BEGIN]).sum() <= num_read + 3 * len(lengths)

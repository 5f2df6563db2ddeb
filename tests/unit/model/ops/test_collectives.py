"""Sums in rank order, rounded once; gathered columns without copies and padding."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from model.ops.collectives import NumpyCollectives

OPS = NumpyCollectives()


def test_a_sum_depends_on_the_order_of_ranks_and_is_rounded_once():
    parts = [np.full((1, 1), value, np.float32) for value in (1e8, 1, -1e8)]
    assert [total.item() for total in OPS.sum(parts)] == [0, 0, 0]
    assert OPS.sum([parts[0], parts[2], parts[1]])[0].item() == 1
    halves = [np.full((1, 1), value, ml_dtypes.bfloat16) for value in (256, 1, 1)]
    assert [float(total.item()) for total in OPS.sum(halves)] == [258] * 3  # 256 + 1 is 256 in bfloat16
    assert OPS.sum(halves)[0].dtype == ml_dtypes.bfloat16


def test_ranks_do_not_share_results():
    first, second = OPS.sum([np.zeros((1, 2), np.float32)] * 2)
    assert not np.shares_memory(first, second)
    first, second = OPS.gather([np.zeros((1, 2), np.float32)] * 2)
    assert not np.shares_memory(first, second)


def test_gathered_columns():
    parts = [np.full((2, 2), rank) for rank in range(4)]
    assert OPS.gather(parts)[3].tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
    assert OPS.gather(parts, copies=2)[0].tolist() == [[0, 0, 2, 2]] * 2
    assert OPS.gather(parts, width=7)[1].shape == (2, 7)

"""Launches of adapters of experts by shapes alone. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.adapter_interface import AdapterMatrix
from model.ops.gpu.adapters.pairs import MAX_SINGLE_PAIRS, add
from model.ops.interface import ExpertGroups
from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher

EXPERTS, SLOTS, RANK, USED = 128, 4, 16, 8


class Launches(StackLauncher):
    def launch(self, name, grid, args, **how):
        self.launched.append((name, grid, [int(arg) for arg in args if isinstance(arg, np.int32)], how))


def launched(num_rows: int, ends=(768, 1536), num_inputs: int = 2048, *, rank=RANK, is_sorted=False, router=False):
    num_experts, pairs = (1, num_rows) if router else (EXPERTS, num_rows * USED)
    count, int32 = SLOTS * num_experts, np.int32
    matrix = AdapterMatrix(
        FakeStack((count, len(ends), rank, num_inputs), BFLOAT16),
        FakeStack((count, ends[-1], rank), BFLOAT16),
        FakeStack((count,), int32),
        ends,
    )
    groups = ExpertGroups(
        FakeStack((pairs,), int32), FakeStack((num_rows, USED), int32), FakeStack((EXPERTS + 1,), int32)
    )
    x = FakeStack((pairs if is_sorted else num_rows, num_inputs), BFLOAT16)
    out = FakeStack((pairs, ends[-1]), np.float32 if router else BFLOAT16)
    ops = Launches()
    add(ops, x, matrix, FakeStack((num_rows,), int32), out, None if router else groups, is_sorted)
    return ops.launched


def test_a_row_shares_its_columns():
    [(name, grid, sizes, how)] = launched(1)
    assert (name, grid) == ("experts_lora", (8, 2, 2))
    assert sizes == [8, EXPERTS, 2048, 1536, 2, RANK, 0, 512]
    assert how == {"threads": 256, "shared_bytes": 4 * RANK, "overlaps": True, "PAIRS": 1, "OUT_FLOAT": 0}


def test_a_prompt_takes_several_pairs_at_once():
    [(_, grid, sizes, how)] = launched(MAX_SINGLE_PAIRS // USED + 1, (2048,), 768, is_sorted=True)
    assert grid == (132, 1, 1)
    assert sizes[-2:] == [1, 2048]
    assert (how["PAIRS"], how["shared_bytes"]) == (2, 2 * 4 * RANK)


def test_a_router_s_rows_are_pairs():
    [(_, grid, sizes, how)] = launched(64, (EXPERTS,), router=True)
    assert grid == (64, 1, 1)
    assert sizes == [64, 1, 2048, EXPERTS, 1, RANK, 0, 512]
    assert how["OUT_FLOAT"] == 1


def test_no_rows_launch_nothing():
    assert launched(0) == []


def test_what_the_kernel_does_not_take_is_refused():
    with pytest.raises(ValueError, match="lora_add: 2052 inputs and rank 16"):
        launched(1, num_inputs=2052)
    with pytest.raises(ValueError, match="lora_add: 2048 inputs and rank 12"):
        launched(1, rank=12)
    with pytest.raises(ValueError, match=r"parts that end at \(512, 1536\) and 128 experts"):
        launched(1, (512, 1536))

"""Adapters' products of ranks against those of one rank."""

from __future__ import annotations

import numpy as np

from model.adapter_slots import adapter_rows
from model.ops.adapter_interface import AdapterMatrix
from model.ops.backend import adapter_ops
from model.ops.cpu.ops import NumpyOps
from model.ops.group.arrays import GroupArray, PartialSums, Section, Split, SplitArray
from tests.support.group import group_of

ONE = NumpyOps()
ENDS, OWN_ENDS, NUM_INPUTS = (8, 12, 20), (4, 6, 10), 24
COLUMNS = Split(1, (Section(8), Section(4), Section(8)))
INPUTS = Split(1, (Section(NUM_INPUTS),))


def parts_of(whole: np.ndarray, split: Split) -> tuple[np.ndarray, ...]:
    return tuple(split.part_of(whole, rank, 2) for rank in range(2))


def test_a_rank_adds_to_its_own_outputs_or_to_its_partial_sum():
    group = group_of(2)
    rng, ops = np.random.default_rng(0), adapter_ops(group)
    ranks = np.array([8, 0, 3], np.int32)
    a = rng.standard_normal((3, 3, 8, NUM_INPUTS)).astype(np.float32)
    b = rng.standard_normal((3, ENDS[-1], 8)).astype(np.float32)
    x, out = (rng.standard_normal((6, width)).astype(np.float32) for width in (NUM_INPUTS, ENDS[-1]))
    rows = adapter_rows(np.array([2, -1, 0, 1, 0, 2], np.int32), group)
    same, expected = group.upload, out.copy()
    whole, own_rows = AdapterMatrix(a, b, ranks, ENDS), adapter_rows(np.array([2, -1, 0, 1, 0, 2], np.int32), ONE)
    ONE.lora_expand(ONE.lora_shrink(x, whole, own_rows), whole, own_rows, expected)

    by_rows = AdapterMatrix(same(a), GroupArray(parts_of(b, Split(1, COLUMNS.sections))), same(ranks), OWN_ENDS)
    columns = SplitArray(parts_of(out, COLUMNS), COLUMNS)
    ops.lora_expand(ops.lora_shrink(same(x), by_rows, rows), by_rows, rows, columns)
    np.testing.assert_allclose(group.download(columns), expected, atol=1e-5)

    by_inputs = AdapterMatrix(GroupArray(parts_of(a, Split(3, INPUTS.sections))), same(b), same(ranks), ENDS)
    sums = PartialSums((out.copy(), np.zeros_like(out)))
    ops.lora_expand(ops.lora_shrink(GroupArray(parts_of(x, INPUTS)), by_inputs, rows), by_inputs, rows, sums)
    np.testing.assert_allclose(sum(sums.parts), expected, atol=1e-5)

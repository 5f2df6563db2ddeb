"""Arrays of a group: where the parts of a split lie, and what code cannot do by mistake."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.group.arrays import (
    GroupArray,
    PartialSums,
    Section,
    Split,
    divided,
    joined,
    on_rank,
    own_rows,
    stacked,
    whole_nbytes,
)
from model.ops.interface import Fp8Rows
from model.ops.packing import TableRows
from model.ops.weight import Weight

QKV = Split(0, (Section(16), Section(4, 2), Section(4, 2)))


def test_sections_are_divided_each_by_itself_and_copied_to_neighbours():
    assert [list(QKV.ranges(rank, 4)) for rank in range(4)] == [
        [(0, 0, 4), (4, 16, 18), (6, 20, 22)],
        [(0, 4, 8), (4, 16, 18), (6, 20, 22)],
        [(0, 8, 12), (4, 18, 20), (6, 22, 24)],
        [(0, 12, 16), (4, 18, 20), (6, 22, 24)],
    ]
    assert (QKV.part_size(4), QKV.size, QKV.part_shape((24, 3), 4)) == (8, 24, (8, 3))


def test_what_does_not_divide_is_padded_in_the_last_parts():
    split = Split(1, (Section(9),))
    assert [list(split.ranges(rank, 4)) for rank in range(4)] == [[(0, 0, 3)], [(0, 3, 6)], [(0, 6, 9)], [(0, 9, 9)]]
    assert split.whole_shape((2, 3)) == (2, 9)
    whole = np.arange(1, 19).reshape(2, 9)
    assert split.part_of(whole, 1, 4).tolist() == [[4, 5, 6], [13, 14, 15]]
    assert split.part_of(whole, 3, 4).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert QKV.part_of(np.arange(24), 1, 4).tolist() == [4, 5, 6, 7, 16, 17, 20, 21]


def test_stacked_splits_keep_their_order():
    parts = [Split(0, (section,)) for section in QKV.sections]
    assert stacked(parts) == QKV
    assert stacked([None]) is None
    assert stacked([Split(1, (Section(8),))]) == Split(1, (Section(8),))


def test_an_array_is_indexed_viewed_and_assigned_on_each_rank():
    array = GroupArray((np.arange(6), np.arange(6) + 10))
    array[2:4] = GroupArray((np.array([7, 8]), np.array([9, 9])))
    assert [part.tolist() for part in array[1:5].parts] == [[1, 7, 8, 4], [11, 9, 9, 14]]
    assert array.reshape(2, -1).shape == (2, 3)
    assert (len(array), array.size, array.nbytes, array.view(np.uint8).dtype) == (6, 6, 48, np.uint8)


def test_rows_divided_among_ranks_have_no_common_index():
    array = divided(GroupArray((np.zeros((2, 3)), np.zeros((2, 3)))), Split(0, (Section(4),)))
    assert whole_nbytes(array) == 4 * 3 * 8
    with pytest.raises(TypeError, match="divided by rows"):
        array[0]


def test_own_rows_are_views():
    whole = GroupArray((np.arange(4), np.arange(4)))
    own = own_rows(whole, Split(0, (Section(3),)))
    assert [part.tolist() for part in own.parts] == [[0, 1], [2, 3]]
    assert all(np.shares_memory(part, held) for part, held in zip(own.parts, whole.parts, strict=True))


def test_a_rank_gets_its_arrays_inside_of_what_holds_them():
    pair = GroupArray((np.zeros(1), np.ones(1)))
    weight = on_rank(Weight(pair, scale=pair, group_size=3), 1)
    assert (weight.data[0], weight.scale[0], weight.group_size, weight.zero_point) == (1, 1, 3, None)
    rows = on_rank(TableRows(np.zeros((1, 1)), np.zeros(1), pair), 1)
    assert isinstance(rows, TableRows)
    assert rows.table[0] == 1
    assert on_rank((2, [pair, None]), 0) == (2, [0, None])
    with pytest.raises(TypeError, match="partial sums"):
        on_rank([PartialSums(pair.parts)], 0)


def test_results_of_ranks_are_joined_field_by_field():
    rows = joined([Fp8Rows(np.zeros(1), np.zeros(2)), Fp8Rows(np.ones(1), np.ones(2))])
    assert isinstance(rows.data, GroupArray)
    assert rows.scale.parts[1].tolist() == [1, 1]
    assert joined([None, None]) is None
    [first, second] = joined([(np.zeros(1), None), (np.ones(1), None)])
    assert (type(first), second) == (GroupArray, None)

"""A group as one device: what all ranks do, and what is read of them."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.collectives import NumpyCollectives
from model.ops.cpu.ops import FLOAT32, NumpyOps
from model.ops.group.arrays import GroupArray, Section, Split, each_rank
from model.ops.group.device import upload_parts
from model.ops.group.ops import GroupOps
from model.ops.packing import TableRows
from tests.support.group import group_of


def test_ranks_that_differ_in_what_they_share_are_an_error():
    ops, differing = group_of(2), GroupArray((np.zeros(2), np.array([0, 1.0])))
    with pytest.raises(RuntimeError, match="ranks 0 and 1 differ"):
        ops.download(differing)
    with pytest.raises(RuntimeError, match="ranks 0 and 1 differ"):
        ops.download_async([differing])()
    assert ops.download(each_rank(differing)).tolist() == [0, 0, 0, 1]


def test_a_group_has_the_memory_of_its_smallest_rank():
    whole, half = NumpyOps(), NumpyOps(num_sharing=2)
    assert GroupOps([half, whole], NumpyCollectives()).memory_bytes()[1] == whole.memory_bytes()[1] // 2


def test_uploads_go_to_every_rank_and_tables_too():
    ops = group_of(2)
    table = ops.empty((3, 2), np.dtype(np.int32))
    rows = TableRows(np.array([[7]], np.int32), np.array([2]), table)
    first, second = ops.upload_all([np.arange(3), np.arange(2)], rows=rows)
    assert [part.tolist() for part in first.parts] == [[0, 1, 2]] * 2
    assert ops.download(second).tolist() == [0, 1]
    assert ops.download(table)[2].tolist() == [7, 0]


def test_parts_are_uploaded_to_their_ranks():
    ops, whole, split = group_of(2), np.arange(8).reshape(2, 4), Split(1, (Section(2), Section(2)))
    parts = upload_parts(ops, whole, split)
    assert [part.tolist() for part in parts.parts] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert ops.download(parts).tolist() == whole.tolist()
    assert ops.download(upload_parts(ops, whole, None)).tolist() == whole.tolist()
    assert upload_parts(NumpyOps(), whole, split).tolist() == whole.tolist()


def test_work_runs_once_for_all_ranks_when_it_is_replayed():
    ops, runs = group_of(3), []
    with ops.scratch():
        ops.compile_ahead(lambda: runs.append("nothing to compile"))
        replay = ops.capture(lambda: runs.append("work"), lambda: runs.append("first"))
    replay()
    assert runs == ["first", "work"]


def test_events_and_names():
    ops = group_of(2)
    begin = ops.record_event()
    ops.synchronize()
    assert ops.elapsed_s(begin, ops.record_event()) >= 0
    assert (ops.name, ops.device_name, ops.num_ranks) == ("numpy", "2 x CPU", 2)
    assert ops.temporary((2,), FLOAT32).shape == (2,)

"""Numbers of rows that share their algorithms."""

from __future__ import annotations

from model.cuda_graphs import CHUNK_ROWS, CHUNK_ROWS_ALONE, CHUNK_ROWS_WITH_FEW, MAX_CHUNKS, decode_sizes
from model.ops.gpu.product_sizes import all_planned_rows, planned_rows


def test_no_number_takes_the_algorithms_of_fewer_rows_or_of_many_more():
    for rows in range(1, 10000):
        planned = planned_rows(rows)
        assert rows <= planned <= max(rows + 7, 1.25 * rows)
        assert planned_rows(planned) == planned


def test_captured_steps_are_planned_by_themselves():
    beside = (16, 64, 128, 256, 384, 512)
    captured = {*decode_sizes(512), *CHUNK_ROWS_ALONE, MAX_CHUNKS, *(decodes + MAX_CHUNKS for decodes in beside)}
    captured |= {decodes + more for decodes in beside for more in CHUNK_ROWS}
    captured |= {beside[0] + more for more in CHUNK_ROWS_WITH_FEW}
    assert {size for size in captured if planned_rows(size) != size} == {12}  # our own kernel's


def test_all_planned_rows_end_at_the_maximum():
    assert all_planned_rows(20) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]
    assert all_planned_rows(8192)[-3:] == [7168, 7680, 8192]
    assert len(all_planned_rows(8192)) < 100

"""The path of a sum."""

from __future__ import annotations

import pytest

from model.ops.gpu.group.paths import LIMITS, SumPath, fits_push, path_of, uses_nccl


@pytest.mark.parametrize("num_ranks", LIMITS)
def test_larger_sums_take_later_paths(num_ranks: int):
    row_bytes, limits = 8192, LIMITS[num_ranks]
    assert limits.push <= limits.pull <= limits.two_shot
    sizes = [2**n for n in range(14)]
    paths = [path_of(num_ranks, rows, row_bytes, has_nccl=True) for rows in sizes]
    order = list(SumPath)
    assert paths == sorted(paths, key=order.index)
    last = SumPath.PULL if num_ranks == 2 else SumPath.NCCL  # two ranks never need another
    assert {paths[0], paths[-1]} == {SumPath.PUSH, last}
    without_nccl = path_of(num_ranks, 8192, row_bytes, has_nccl=False)
    assert without_nccl is (SumPath.PULL if num_ranks == 2 else SumPath.TWO_SHOT)


def test_two_ranks_do_without_nccl():
    assert [uses_nccl(num_ranks) for num_ranks in (2, 4, 8)] == [False, True, True]


def test_pushed_rows_fit_their_slots():
    assert fits_push(16, 32 << 10)
    for rows, row_bytes in ((17, 16), (1, (32 << 10) + 16), (1, 24)):
        assert not fits_push(rows, row_bytes)
    assert path_of(2, 1, 24, has_nccl=True) is SumPath.PULL

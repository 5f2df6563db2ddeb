"""Launches of a sum: every rank's kernel is loaded before the first is launched, each on its own device."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.gpu.group.collectives import SUM_BLOCKS, CudaCollectives, LateRankError
from model.ops.gpu.group.paths import SumPath
from model.ops.interface import Fp8Rows, TokenCandidates
from tests.support.fake_ranks import Addressed, FakeRank, launches


@pytest.fixture
def log() -> list[tuple[object, ...]]:
    return []


def ranks_of(log, count: int = 2) -> list[FakeRank]:
    return [FakeRank(number, log) for number in range(count)]


def arrays(count: int, shape: tuple[int, ...], dtype: type = np.float32) -> list[np.ndarray]:
    return [np.ones(shape, dtype).view(Addressed) for _ in range(count)]


class Mover:
    def __init__(self, log):
        self.log = log

    def exchange(self, parts, into, num_bytes):
        for rank, target in enumerate(into):
            for peer, part in enumerate(parts):
                own = part.reshape(-1).view(np.uint8)[rank * num_bytes : (rank + 1) * num_bytes]
                target[peer * num_bytes :][: len(own)] = own
        self.log.append(("exchange", num_bytes))

    def gather(self, arrays, num_bytes):
        self.log.append(("gather", num_bytes))


def test_all_are_loaded_then_all_are_launched_on_their_devices(log):
    sums = CudaCollectives(ranks_of(log, 4))
    log.clear()
    sums.sum_by(SumPath.TWO_SHOT, arrays(4, (512, 4096)))
    kinds = [one[0] for one in log if one[0] != "use"]
    assert kinds == ["load"] * 4 + ["launch"] * 4
    used = None
    for one in log:
        used = one[1] if one[0] == "use" else used
        assert one[1] == used
    assert launches(log)[3][1:3] == ("sum_ranks", (SUM_BLOCKS,))
    assert launches(log)[3][3] == {"threads": 512, "overlaps": True, "NUM_RANKS": 4, "STEPS": 2}


def test_no_rank_launches_while_a_kernel_is_compiled(log):
    ranks = ranks_of(log)
    sums = CudaCollectives(ranks)
    ranks[0].is_missing = True
    sums.sum(arrays(2, (1, 8)))
    assert launches(log) == []


@pytest.mark.parametrize(("path", "grid"), [(SumPath.PUSH, (3,)), (SumPath.PULL, (2,))])
def test_norms_are_fused(log, path: SumPath, grid: tuple[int, ...]):
    sums = CudaCollectives(ranks_of(log), max_blocks=2)
    parts, outs = arrays(2, (3, 64)), arrays(2, (3, 64))
    sums.sum_add_rms_norm(path, parts, outs, outs, 1e-5, outs)
    quantised = [Fp8Rows(*pair) for pair in zip(arrays(2, (3, 64), np.uint8), arrays(2, (3,)), strict=True)]
    sums.sum_add_rms_norm(path, parts, outs, outs, 1e-5, quantised)
    names = ["sum_add_rms_norm"] * 2 + ["sum_add_rms_norm_quantised"] * 2
    assert [(name, blocks) for _, name, blocks, _ in launches(log)] == [(name, grid) for name in names]
    assert all(how["PUSH"] == (path is SumPath.PUSH) for *_, how in launches(log))


@pytest.mark.parametrize(("rows", "blocks"), [(64, 64), (264, 132), (265, 264), (8192, 264)])
def test_two_blocks_share_an_sm_once_each_has_rows(log, rows: int, blocks: int):
    parts = arrays(2, (rows, 8))
    CudaCollectives(ranks_of(log)).sum_add_rms_norm(SumPath.PULL, parts, parts, parts, 1e-5, parts)
    assert [grid for _, _, grid, _ in launches(log)] == [(blocks,)] * 2


def test_nccl_moves_shares_that_each_rank_sums(log):
    sums = CudaCollectives(ranks_of(log), Mover(log))
    log.clear()
    parts = arrays(2, (3, 5))  # 60 bytes: shares of 32 and 28
    totals = sums.sum_by(SumPath.NCCL, parts)
    assert [one for one in log if one[0] in ("exchange", "gather")] == [("exchange", 32), ("gather", 32)]
    sizes = [int(one[4][3]) for one in log if one[0] == "launch"]
    assert sizes == [8, 7]
    assert [total.shape for total in totals] == [(3, 5)] * 2
    first = next(one[4] for one in log if one[0] == "launch")
    assert first[1].view(np.uint64)[0] == parts[0].data.ptr  # its own share stays where it is


def test_paths_in_graphs_are_without_nccl(log):
    ranks = ranks_of(log, 4)
    sums, large = CudaCollectives(ranks, Mover(log)), arrays(4, (4096, 4096), np.float16)
    assert sums.path(large) is SumPath.NCCL
    ranks[0].begin_capture()
    assert sums.path(large) is SumPath.TWO_SHOT


def test_gathers_norms_and_best_tokens(log):
    ranks = ranks_of(log, 4)
    sums = CudaCollectives(ranks)
    assert sums.gather(arrays(4, (2, 6)), copies=2, width=11)[3].shape == (2, 11)
    norms = arrays(4, (4 * 8,)), arrays(4, (2 * 4,))
    sums.normalise_qk(arrays(4, (3, 8 + 2 * 4)), *norms, (8, 4), 1e-5)
    columns = [arrays(4, (5,), dtype) for dtype in (np.int32, np.float32, np.float32)]
    candidates = [TokenCandidates(*own) for own in zip(*columns, strict=True)]
    out = arrays(1, (5,), np.int32)[0]
    sampled = sums.best(candidates, [out, None, None, None])
    assert sampled[0].token_ids is out
    assert sampled[1].is_nan.shape == (5,)
    names = ["gather_ranks", "normalise_qk_ranks", "best_of_ranks"]
    assert [name for _, name, *_ in launches(log)] == [name for name in names for _ in ranks]
    copies = [int(one[4][9]) for one in log if one[0] == "launch" and one[2] == "normalise_qk_ranks"]
    assert copies == [2] * 4


def test_a_late_rank_is_named(log):
    sums = CudaCollectives(ranks_of(log))
    sums.check([np.zeros(1, np.uint32)] * 2)
    with pytest.raises(LateRankError, match=r"rank 1 \(cuda:1, Fake, 0000:01:00.0\) did not come to a sum within 4 s"):
        sums.check([np.array([2], np.uint32), np.zeros(1, np.uint32)])

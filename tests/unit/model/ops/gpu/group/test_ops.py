"""Operations special to a group of GPUs: fused sums, graphs replayed together, errors, one tuning."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.gpu.group.collectives import CudaCollectives, LateRankError
from model.ops.gpu.group.ops import CudaGroupOps
from model.ops.gpu.group.paths import LIMITS, PathLimits
from model.ops.group.arrays import GroupArray, PartialSums, Section, Split, SplitArray
from model.ops.weight import Weight
from tests.support.fake_ranks import Addressed, FakeRank, launches


@pytest.fixture
def log() -> list[tuple[object, ...]]:
    return []


@pytest.fixture
def ops(log) -> CudaGroupOps:
    ranks = [FakeRank(number, log) for number in range(2)]
    return CudaGroupOps(ranks, CudaCollectives(ranks))


def group_array(kind: type[GroupArray], *shape: int) -> GroupArray:
    return kind(tuple(np.ones(shape, np.float32).view(Addressed) for _ in range(2)))


def test_sums_are_fused_with_norms_unless_they_are_large(ops, log, monkeypatch):
    monkeypatch.setitem(LIMITS, 2, PathLimits(push=1 << 10, pull=1 << 20, two_shot=1 << 30))
    residual, weight = group_array(GroupArray, 2, 64), group_array(GroupArray, 64)
    out = group_array(GroupArray, 2, 64)
    assert ops.add_rms_norm(group_array(PartialSums, 2, 64), residual, weight, 1e-5, out) is out
    assert ops.add_rms_norm_quantised(group_array(PartialSums, 2, 64), residual, weight, 1e-5).data.shape == (2, 64)
    assert [name for _, name, *_ in launches(log)] == ["sum_add_rms_norm"] * 2 + ["sum_add_rms_norm_quantised"] * 2
    log.clear()
    ops.add_rms_norm(group_array(GroupArray, 2, 64), residual, weight, 1e-5, out)
    assert launches(log) == []
    ops.rms_norm(group_array(PartialSums, 2, 64), weight, 1e-5)
    ops.add_rms_norm(
        group_array(PartialSums, 4096, 512), *(group_array(GroupArray, *s) for s in ((4096, 512), (512,))), 1
    )
    assert [how["STEPS"] for *_, how in launches(log)] == [1, 1, 2, 2]


def test_graphs_are_captured_and_replayed_together(ops, log):
    states: list[bool] = []
    replay = ops.capture(lambda: states.extend(rank.is_capturing for rank in ops.ranks), lambda: log.append(("warm",)))
    assert states == [True, True]
    assert not any(rank.is_capturing for rank in ops.ranks)
    log.clear()
    replay()
    assert log == [("use", 0), ("replay", 0), ("use", 1), ("replay", 1), ("use", 0)]


def test_a_capture_that_fails_ends_on_all_ranks(ops):
    with pytest.raises(ZeroDivisionError):
        ops.capture(lambda: 1 / 0, lambda: None)
    assert not any(rank.is_capturing for rank in ops.ranks)


def test_kernels_are_compiled_once(ops, log):
    ops.compile_ahead(lambda: log.append(("work",)))
    assert log[-2:] == [("compile", 0, 1), ("work",)]


def test_products_are_tuned_on_one_rank(ops, log):
    ops.tune_linear([Weight(group_array(GroupArray, 4, 4))], None, [1, 2])
    assert [one for one in log if one[0] in ("tune", "share")][-2:] == [("tune", 0, (1, 2)), ("share", 1, 0)]


def test_what_is_read_after_a_late_rank_is_an_error(ops):
    array = ops.upload(np.arange(3))
    assert ops.download_async([array])()[0].tolist() == [0, 1, 2]
    ops.sums.errors[1][0] = 1
    for read in (lambda: ops.download(array), ops.synchronize, ops.download_async([array])):
        with pytest.raises(LateRankError, match=r"rank 0 \(cuda:0"):
            read()


def test_a_rank_that_fails_is_named(ops, monkeypatch):
    def lost():
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(ops.ranks[1], "download_async", lambda arrays: lost)
    fetch = ops.download_async([ops.upload(np.arange(3))])
    with pytest.raises(RuntimeError, match=r"rank 1 \(cuda:1, Fake, 0000:01:00.0\) failed: cudaErrorIllegalAddress"):
        fetch()


def test_norms_over_all_heads_take_one_launch(ops, log):
    qkv = SplitArray(group_array(GroupArray, 3, 16).parts, Split(1, (Section(16), Section(8), Section(8))))
    ops.normalise_qk(qkv, group_array(GroupArray, 16), group_array(GroupArray, 8), 1e-5)
    assert [name for _, name, *_ in launches(log)] == ["normalise_qk_ranks"] * 2


def test_logits_of_a_padded_vocabulary_are_gathered(ops, log, monkeypatch):
    monkeypatch.setattr("model.ops.group.ops.GroupOps.sample", lambda _, logits, *__: logits)
    for size, is_divided in ((8, True), (7, False)):
        logits = SplitArray(group_array(GroupArray, 2, 4).parts, Split(1, (Section(size),)))
        assert isinstance(ops.sample(logits, None), SplitArray) == is_divided
    assert [name for _, name, *_ in launches(log)] == ["gather_ranks"] * 2

"""A rank that never arrives is named within 5 s, for every kind of wait; nothing hangs."""

import time

import numpy as np
import pytest

from model.ops.gpu.group.collectives import LateRankError
from model.ops.gpu.group.paths import SumPath
from tests.support.group_checks import on_ranks
from tests.support.kernel_checks import normal

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]


@pytest.mark.parametrize(
    ("cards", "what"),
    [((0, 1), "push"), ((0, 1), "pull"), ((0, 1), "two-shot"), ((0, 1), "gather"), ((0, 0), "pull")],
    ids=str,
)
def test_a_rank_that_never_comes(open_cards, rng, monkeypatch, cards, what):
    ops = open_cards("bfloat16", cards)
    parts, residual, weight = (
        on_ranks(ops, [normal(rng, (2, 512), "bfloat16")] * 2).parts,
        *(ops.upload(normal(rng, shape, "bfloat16")).parts for shape in ((2, 512), (512,))),
    )
    ops.synchronize()
    monkeypatch.setattr(ops.ranks[1], "launch", lambda *_, **__: None)

    def work() -> None:
        with ops.scratch():
            for _ in range(3):  # later ones leave at once
                if what == "two-shot":
                    ops.sums.sum_by(SumPath.TWO_SHOT, parts)
                elif what == "gather":
                    ops.sums.gather(parts)
                else:
                    ops.sums.sum_add_rms_norm(SumPath(what), parts, residual, weight, 1e-6, residual)
            ops.synchronize()

    start = time.perf_counter()
    with pytest.raises(LateRankError, match=rf"rank 1 \(cuda:{cards[1]}, .*did not come to a sum"):
        work()
    assert time.perf_counter() - start < 5
    fetch = ops.download_async([ops.empty((1,), np.dtype(np.int32))])
    with pytest.raises(LateRankError):
        fetch()

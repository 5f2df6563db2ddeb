"""Sums by themselves, in one step and in two, and by NCCL where it is: NumPy's bits."""

import pytest

from model.ops.gpu.group.paths import SumPath
from tests.support.group_checks import on_ranks, total
from tests.support.kernel_checks import DTYPES, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", [SumPath.PULL, SumPath.TWO_SHOT, SumPath.NCCL])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (1, 1), (3, 33), (7, 4096), (513, 1000), (1024, 4096)])
def test_sums_in_rank_order(open_group, rng, dtype, shape, path):
    ops = open_group(dtype)
    if path is SumPath.NCCL and not ops.sums.has_nccl:
        pytest.skip("needs NCCL and a card for each rank")
    hosts = [normal(rng, shape, dtype) for _ in ops.ranks]
    with ops.scratch():
        parts = on_ranks(ops, hosts)
        assert ops.download(type(parts)(tuple(ops.sums.sum_by(path, parts.parts)))).tobytes() == total(hosts).tobytes()

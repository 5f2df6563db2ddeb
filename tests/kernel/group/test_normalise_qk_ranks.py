"""Norms over the heads of all ranks, in place."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.group.arrays import Section, Split, SplitArray
from tests.support.group_checks import on_ranks
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "copies"), [(1, 1), (40, 2), (700, 1)])
def test_whole_rows_are_normed(open_group, rng, dtype, rows, copies):
    ops, q_size = open_group(dtype), 512
    k_size = 128 * ops.num_ranks // copies
    qkv, norms = normal(rng, (rows, q_size + 2 * k_size), dtype), [normal(rng, (n,), dtype) for n in (q_size, k_size)]
    keys = Section(k_size, copies)
    split = Split(1, (Section(q_size), keys, keys))
    parts = [np.ascontiguousarray(split.part_of(qkv, rank, ops.num_ranks)) for rank in range(ops.num_ranks)]
    divided = SplitArray(on_ranks(ops, parts).parts, split)
    with ops.scratch():
        ops.normalise_qk(divided, *map(ops.upload, norms), 1e-5)
        NumpyOps(NUMPY_DTYPES[dtype]).normalise_qk(qkv, *norms, 1e-5)
        assert_close(ops.download(divided), qkv, dtype)

"""Columns of all ranks side by side."""

import numpy as np
import pytest

from model.ops.collectives import NumpyCollectives
from tests.support.group_checks import on_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64128), (5, 33), (64, 4096), (300, 8)])
def test_columns(open_group, rng, dtype, rows, width):
    ops = open_group("float16")
    hosts = [rng.integers(0, 2000, (rows, width)).astype(dtype) for _ in ops.ranks]
    parts = on_ranks(ops, hosts)
    for options in ({}, {"copies": 2}, {"width": ops.num_ranks * width - 3}):
        with ops.scratch():
            gathered = type(parts)(tuple(ops.sums.gather(parts.parts, **options)))
            expected = NumpyCollectives().gather(hosts, **options)[0]
            np.testing.assert_array_equal(ops.download(gathered), expected)

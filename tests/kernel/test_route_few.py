"""Routing and grouping of few rows in one launch."""

import numpy as np
import pytest

from tests.support.expert_checks import REFERENCE

pytestmark = pytest.mark.gpu

SHAPES = [(1, 8, 2), (1, 128, 8), (8, 128, 8), (5, 33, 1), (7, 60, 4), (8, 1024, 32), (9, 16, 2), (3, 64, 40)]
"""T, E, k; the last two take two launches."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_groups(open_ops, rng, shape, renormalise, has_padding):
    (rows, experts, used), ops = shape, open_ops("bfloat16")
    logits = np.round(rng.standard_normal((rows, experts)) * 3).astype(np.float32)  # ties
    slots = rng.integers(0, 64, rows)
    if has_padding:
        slots[rows // 2 :] = 64
    with ops.scratch():
        weights, groups = ops.route_to_groups(ops.upload(logits), used, renormalise, ops.upload(slots), 64)
        found = [ops.download(array) for array in (weights, groups.rows, groups.places, groups.offsets)]
    expected, wanted = REFERENCE.route_to_groups(logits, used, renormalise, slots, 64)
    num_pairs = wanted.offsets[-1]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(found[1][:num_pairs], wanted.rows[:num_pairs])
    np.testing.assert_array_equal(found[2], wanted.places)
    np.testing.assert_array_equal(found[3], wanted.offsets)

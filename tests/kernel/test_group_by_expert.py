import numpy as np
import pytest

from tests.support.expert_checks import REFERENCE, routed_ids

pytestmark = pytest.mark.gpu

SHAPES = [(1, 8, 2), (3, 128, 8), (64, 128, 8), (8192, 128, 8), (515, 8, 2), (100, 1024, 7), (1, 1, 1)]
"""T, E, k."""


@pytest.mark.parametrize("shape", SHAPES)
def test_groups(open_ops, rng, shape):
    ops, ids = open_ops("bfloat16"), routed_ids(rng, *shape)
    with ops.scratch():
        found = ops.group_by_expert(ops.upload(ids), shape[1])
        arrays = [ops.download(array) for array in (found.rows, found.places, found.offsets)]
    expected = REFERENCE.group_by_expert(ids, shape[1])
    for actual, wanted in zip(arrays, (expected.rows, expected.places, expected.offsets), strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("rows", [5, 700])
def test_pairs_of_padding_are_left_out(open_ops, rng, rows):
    ops, ids = open_ops("bfloat16"), routed_ids(rng, rows, 16, 4)
    ids[2::3] = -1
    with ops.scratch():
        found = ops.group_by_expert(ops.upload(ids), 16)
        arrays = [ops.download(array) for array in (found.rows, found.places, found.offsets)]
    expected = REFERENCE.group_by_expert(ids, 16)
    num_pairs = expected.offsets[-1]
    np.testing.assert_array_equal(arrays[0][:num_pairs], expected.rows[:num_pairs])
    np.testing.assert_array_equal(arrays[1], expected.places)
    np.testing.assert_array_equal(arrays[2], expected.offsets)

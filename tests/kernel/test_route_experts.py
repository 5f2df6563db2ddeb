import numpy as np
import pytest

from tests.support.expert_checks import REFERENCE

pytestmark = pytest.mark.gpu

SHAPES = [(1, 8, 2), (513, 128, 8), (33, 1, 1), (7, 60, 4), (9, 1024, 32), (0, 16, 2)]
"""T, E, k."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("renormalise", [False, True])
def test_routes(open_ops, rng, shape, renormalise):
    (rows, experts, used), ops = shape, open_ops("bfloat16")
    logits = (rng.standard_normal((rows, experts)) * 3).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    with ops.scratch():
        ids, weights = map(ops.download, ops.route_experts(ops.upload(logits), used, renormalise))
    expected_ids, expected = REFERENCE.route_experts(logits, used, renormalise)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_broken_row_takes_different_experts(open_ops, rng, value):
    ops, logits = open_ops("bfloat16"), rng.standard_normal((3, 40)).astype(np.float32)
    logits[1] = value
    with ops.scratch():
        ids, weights = map(ops.download, ops.route_experts(ops.upload(logits), 4, True))
    assert len(set(ids[1].tolist())) == 4
    assert ((ids >= 0) & (ids < 40)).all()
    assert np.isnan(weights[1]).all()
    assert np.isfinite(weights[[0, 2]]).all()


def test_rows_outside_the_cache_take_none(open_ops, rng):
    ops, logits = open_ops("bfloat16"), rng.standard_normal((21, 60)).astype(np.float32)
    slots = rng.integers(0, 64, 21)
    slots[[3, 7, 20]] = 64, -1, 1 << 40
    with ops.scratch():
        routed = ops.route_experts(ops.upload(logits), 4, True, ops.upload(slots), 64)
        ids, weights = map(ops.download, routed)
    expected_ids, expected = REFERENCE.route_experts(logits, 4, True, slots, 64)
    assert (ids[[3, 7, 20]] == -1).all()
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)

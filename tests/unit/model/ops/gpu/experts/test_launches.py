"""Launches of routing, grouping and summing. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher

reason = "needs the packages of the cuda extra"
launches = pytest.importorskip("model.ops.gpu.experts.launches", reason=reason, exc_type=ImportError)

EXPERTS, USED, N = 16, 2, 256


def test_routing_and_summing_are_one_launch_each():
    ops = StackLauncher()
    logits, slots = FakeStack((4, EXPERTS), np.float32), FakeStack((4,), np.int64)
    ids, weights = launches.route_experts(ops, logits, (USED, True), slots, 64)
    groups = launches.group_by_expert(ops, ids, EXPERTS)
    out = launches.combine_experts(ops, FakeStack((4 * USED, N), BFLOAT16), groups, weights)
    assert ops.launched == ["route_experts", "group_by_expert", "combine_experts"]
    assert (groups.rows.shape, groups.places.shape, groups.offsets.shape) == ((8,), (4, USED), (EXPERTS + 1,))
    assert out.shape == (4, N)


def test_more_experts_than_the_kernels_take_are_refused():
    with pytest.raises(ValueError, match="9 of 8 experts"):
        launches.route_experts(StackLauncher(), FakeStack((4, 8), np.float32), (9, True), None, 0)
    with pytest.raises(ValueError, match="2000 experts"):
        launches.group_by_expert(StackLauncher(), FakeStack((4, 8), np.int32), 2000)


def test_few_rows_are_routed_and_grouped_in_one_launch():
    launched = {}
    for rows in (1, 8, 9):
        ops = StackLauncher()
        weights, groups = launches.route_to_groups(ops, FakeStack((rows, EXPERTS), np.float32), (USED, True), None, 0)
        launched[rows] = ops.launched
        assert (weights.shape, groups.places.shape, groups.rows.shape) == ((rows, USED), (rows, USED), (rows * USED,))
    assert launched == {1: ["route_few"], 8: ["route_few"], 9: ["route_experts", "group_by_expert"]}

"""Routing, grouping, grouped products and their sum, against plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import Array, ExpertGroups, Fp8Rows
from model.ops.weight import Weight, WeightFormat

OPS = NumpyOps()
ROWS, EXPERTS, USED, WIDTH, OUT = 37, 11, 3, 32, 24


def routed(seed: int = 0) -> tuple[np.ndarray, Array, Array, ExpertGroups]:
    logits = np.random.default_rng(seed).standard_normal((ROWS, EXPERTS)).astype(np.float32)
    ids, weights = OPS.route_experts(logits, USED, renormalise=True)
    return logits, ids, weights, OPS.group_by_expert(ids, EXPERTS)


@pytest.mark.parametrize("renormalise", [False, True])
def test_a_row_takes_its_most_probable_experts(renormalise: bool):
    logits, *_ = routed()
    ids, weights = OPS.route_experts(logits, USED, renormalise)
    softmax = np.exp(logits.astype(np.float64))
    softmax /= softmax.sum(axis=1, keepdims=True)
    best = np.sort(softmax, axis=1)[:, ::-1][:, :USED]
    expected = best / best.sum(axis=1, keepdims=True) if renormalise else best
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_array_equal(np.take_along_axis(softmax, ids, axis=1), best)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32


def test_ties_go_to_the_lower_id():
    ids, _ = OPS.route_experts(np.array([[0, 1, 1, 0, 1]], np.float32), 4, renormalise=True)
    assert ids.tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("logits", [[np.nan, 1, 2, 3], [-np.inf] * 4, [np.nan] * 4])
def test_a_broken_row_takes_different_experts_and_gives_nan(logits: list[float]):
    ids, weights = OPS.route_experts(np.array([logits], np.float32), 2, renormalise=False)
    assert len(set(ids[0].tolist())) == 2
    assert set(ids[0].tolist()) <= set(range(4))
    assert np.isnan(weights).all()


def test_pairs_are_sorted_by_expert_and_then_by_row():
    _, ids, _, groups = routed()
    assert groups.offsets[0] == 0
    assert groups.offsets[-1] == ROWS * USED
    for expert in range(EXPERTS):
        pairs = np.arange(groups.offsets[expert], groups.offsets[expert + 1])
        rows = groups.rows[pairs]
        assert (ids[rows] == expert).any(axis=1).all()
        assert (np.diff(rows) > 0).all()
        np.testing.assert_array_equal(groups.places[rows][ids[rows] == expert], pairs)


def stack(format: WeightFormat) -> tuple[Weight, np.ndarray]:
    """A stack [E, OUT, WIDTH] and what it holds."""
    rng = np.random.default_rng(1)
    if format is WeightFormat.DENSE:
        dense = rng.standard_normal((EXPERTS, OUT, WIDTH)).astype(np.float32)
        return Weight(dense.copy()), dense
    data = (rng.standard_normal((EXPERTS * OUT, WIDTH))).astype(np.float32)
    rows = OPS.quantise_rows(data)
    scale, bits = rows.scale.reshape(EXPERTS, OUT), rows.data.reshape(EXPERTS, OUT, WIDTH)
    return Weight(bits, WeightFormat.FP8, scale), OPS.dequantise_rows(rows).reshape(bits.shape)


@pytest.mark.parametrize("format", [WeightFormat.DENSE, WeightFormat.FP8])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_each_pair_is_multiplied_with_its_expert(format: WeightFormat, is_sorted: bool):
    _, ids, _, groups = routed()
    weight, dense = stack(format)
    x = np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype(np.float32)
    rows, weight = x[groups.rows] if is_sorted else x, OPS.prepare_weight(weight)
    out = OPS.experts_linear(rows, weight, groups, is_sorted=is_sorted)
    for row in range(ROWS):
        for expert, place in zip(ids[row], groups.places[row], strict=True):
            np.testing.assert_allclose(out[place], dense[expert] @ x[row], rtol=1e-4, atol=1e-4)


def test_rows_in_e4m3():
    _, _, _, groups = routed()
    weight, dense = stack(WeightFormat.FP8)
    weight = replace(weight, quantised_input=True)
    rows = OPS.quantise_rows(np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype(np.float32))
    assert isinstance(rows, Fp8Rows)
    plain = OPS.dequantise_rows(rows)
    expected = OPS.experts_linear(plain, Weight(dense), groups)
    np.testing.assert_allclose(OPS.experts_linear(rows, weight, groups), expected, rtol=1e-4, atol=1e-4)


def test_the_sum_of_a_row_s_experts():
    _, _, weights, groups = routed()
    x = np.random.default_rng(3).standard_normal((ROWS * USED, OUT)).astype(np.float32)
    out = OPS.combine_experts(x, groups, weights)
    for row in range(ROWS):
        expected = sum(weights[row, j] * x[groups.places[row, j]] for j in range(USED))
        np.testing.assert_allclose(out[row], expected, rtol=1e-5, atol=1e-6)


def test_one_row_goes_the_same_way_alone():
    logits, ids, weights, _ = routed()
    own_ids, own_weights = OPS.route_experts(logits[5:6], USED, renormalise=True)
    np.testing.assert_array_equal(own_ids[0], ids[5])
    np.testing.assert_array_equal(own_weights[0], weights[5])


def test_a_prepared_stack_takes_no_more_memory():
    weight, _ = stack(WeightFormat.DENSE)
    assert OPS.prepare_weight(weight).data is weight.data


def test_rows_outside_the_cache_take_no_expert():
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((ROWS, EXPERTS)).astype(np.float32)
    slots = np.arange(ROWS, dtype=np.int64)
    slots[[5, 6, 36]] = ROWS, -1, 1 << 40
    ids, weights = OPS.route_experts(logits, USED, True, slots, ROWS)
    groups = OPS.group_by_expert(ids, EXPERTS)
    x, stack = rng.standard_normal((ROWS, WIDTH)).astype(np.float32), rng.standard_normal((EXPERTS, OUT, WIDTH))
    sums = OPS.combine_experts(OPS.experts_linear(x, Weight(stack.astype(np.float32)), groups), groups, weights)
    assert groups.offsets[-1] == (ROWS - 3) * USED
    assert not sums[[5, 6, 36]].any()
    kept = np.delete(np.arange(ROWS), [5, 6, 36])
    alone_ids, alone_weights = OPS.route_experts(logits[kept], USED, True)
    alone = OPS.group_by_expert(alone_ids, EXPERTS)
    product = OPS.experts_linear(x[kept], Weight(stack.astype(np.float32)), alone)
    np.testing.assert_allclose(sums[kept], OPS.combine_experts(product, alone, alone_weights), rtol=1e-5, atol=1e-6)

"""Operations of experts made of others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import Routing
from model.ops.weight import ExpertWeights, Weight
from tests.support.goldens import relative_error

OPS = NumpyOps()
ROWS, EXPERTS, USED, INNER, HIDDEN = 5, 6, 2, 12, 16


def random_weights(rng: np.random.Generator) -> ExpertWeights:
    shapes = (EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    arrays = (rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5) for shape in shapes)
    return ExpertWeights(*map(Weight, arrays))


def by_loops(weights: ExpertWeights, x: np.ndarray) -> np.ndarray:
    """One row and one expert at a time, in double precision."""
    out = np.zeros(x.shape)
    for row, inputs in enumerate(x.astype(np.float64)):
        probabilities = np.exp(weights.router.data @ inputs)
        probabilities /= probabilities.sum()
        for expert in np.argsort(-probabilities)[:USED]:
            gate, up = np.split(weights.gate_up.data[expert] @ inputs, 2)
            out[row] += probabilities[expert] * (weights.down.data[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def test_a_norm_is_added_and_sent_to_its_experts():
    rng = np.random.default_rng(0)
    weights, (x, residual) = random_weights(rng), rng.standard_normal((2, ROWS, HIDDEN), np.float32)
    total, slots = x + residual, np.array([3, 4, 64, 5, -1])
    normed = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6)
    expected = by_loops(weights, normed)
    expected[[2, 4]] = 0  # padding
    found = OPS.add_norm_experts(
        x, residual, np.ones(HIDDEN, np.float32), 1e-6, weights, Routing(USED, False, slots, 64)
    )
    np.testing.assert_allclose(residual, total, rtol=1e-6)
    assert relative_error(found, expected) < 1e-5


def test_rows_are_rounded_to_e4m3_after_the_router():
    rng = np.random.default_rng(0)
    weights, x = random_weights(rng), rng.standard_normal((ROWS, HIDDEN), np.float32)

    def rounded(weight: Weight) -> Weight:
        rows = OPS.quantise_rows(weight.data.reshape(-1, weight.shape[1]))
        return Weight.fp8(rows.data.reshape(weight.data.shape), rows.scale.reshape(weight.data.shape[:2]))

    in_fp8 = replace(weights, gate_up=rounded(weights.gate_up), down=rounded(weights.down))
    one, routing = np.ones(HIDDEN, np.float32), Routing(USED, False)
    found = OPS.add_norm_experts(np.zeros_like(x), x.copy(), one, 1e-6, in_fp8, routing)
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
    assert 1e-4 < relative_error(found, by_loops(weights, normed)) < 0.08


def test_gated_experts_are_two_products_and_a_weighted_sum():
    rng = np.random.default_rng(1)
    x, ids = (
        rng.standard_normal((ROWS, HIDDEN)).astype(np.float32),
        np.array([[0, 3], [3, 5], [1, 0], [4, 2], [-1, -1]]),
    )
    gate_up = rng.standard_normal((EXPERTS, 2 * INNER, HIDDEN)).astype(np.float32)
    down, weights = rng.standard_normal((EXPERTS, HIDDEN, INNER)).astype(np.float32), rng.random((ROWS, 2), np.float32)
    groups = OPS.group_by_expert(ids.astype(np.int32), EXPERTS)
    expected = np.zeros((ROWS, HIDDEN))
    for row, expert in np.ndindex(ROWS - 1, 2):
        gate, up = np.split(gate_up[ids[row, expert]] @ x[row], 2)
        expected[row] += weights[row, expert] * (down[ids[row, expert]] @ (gate / (1 + np.exp(-gate)) * up))
    assert relative_error(OPS.gated_experts(x, Weight(gate_up), Weight(down), groups, weights), expected) < 1e-5

"""The gated MLP against its formula, and against its operations with rounded inputs."""

from __future__ import annotations

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.fp8 import quantise
from model.ops.interface import Fp8Rows
from model.ops.weight import Weight

OPS = NumpyOps()


def matrices(rng: np.random.Generator, *shapes: tuple[int, int]) -> list[np.ndarray]:
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_two_products_and_an_activation():
    x, gate_up, down = matrices(np.random.default_rng(0), (3, 8), (12, 8), (5, 6))
    gate, up = x @ gate_up[:6].T, x @ gate_up[6:].T
    expected = gate / (1 + np.exp(-gate)) * up @ down.T
    np.testing.assert_allclose(OPS.gated_mlp(x, Weight(gate_up), Weight(down)), expected, rtol=1e-4, atol=1e-5)


def test_inputs_of_e4m3_weights_are_rounded():
    x, *matrices_ = matrices(np.random.default_rng(0), (3, 16), (32, 16), (5, 16))
    gate_up, down = (Weight.fp8(*quantise(matrix)) for matrix in matrices_)
    rows = Fp8Rows(*quantise(x))
    expected = OPS.linear(OPS.silu_mul_quantised(OPS.linear(rows, gate_up)), down)
    np.testing.assert_array_equal(OPS.gated_mlp(rows, gate_up, down), expected)


def test_the_mlp_takes_the_norm_of_the_sum():
    rng = np.random.default_rng(0)
    x, residual, gate_up, down = matrices(rng, (1, 8), (1, 8), (12, 8), (5, 6))
    norm, held, weights = rng.standard_normal(8, np.float32), residual.copy(), (Weight(gate_up), Weight(down))
    found = OPS.add_norm_gated_mlp(x, held, (norm, 1e-5), *weights)
    total = residual + x
    normed = total / np.sqrt(np.mean(total**2) + 1e-5) * norm
    np.testing.assert_allclose(found, OPS.gated_mlp(normed, *weights), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(held, total)

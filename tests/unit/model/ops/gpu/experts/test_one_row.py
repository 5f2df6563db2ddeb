"""Rows that take one launch for a layer's experts. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.interface import Routing
from model.ops.weight import ExpertWeights, Weight
from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher

reason = "needs the packages of the cuda extra"
one_row = pytest.importorskip("model.ops.gpu.experts.one_row", reason=reason, exc_type=ImportError)

EXPERTS, USED, HIDDEN, INNER = 128, 8, 2048, 768
EXCHANGE = FakeStack((one_row.MAX_WORDS,), np.uint64), FakeStack((132,), np.uint32)


def expert_weights(num_experts: int, hidden: int, inner: int) -> ExpertWeights:
    shapes = (num_experts, hidden), (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    return ExpertWeights(*(Weight(FakeStack(shape, BFLOAT16)) for shape in shapes))


def test_one_row_takes_one_launch():
    ops, x, weights = StackLauncher(), FakeStack((1, HIDDEN), BFLOAT16), expert_weights(EXPERTS, HIDDEN, INNER)
    routing = Routing(USED, True, FakeStack((1,), np.int64), 64)
    assert one_row.can_take_row(ops, x, weights, routing)
    norm = FakeStack((HIDDEN,), BFLOAT16), 1e-6
    out = one_row.experts_of_row(ops, (x, x), norm, weights, routing, EXCHANGE)
    assert ops.launched == ["experts_row"]
    assert out.shape == (1, HIDDEN)


@pytest.mark.parametrize(
    ("num_rows", "sizes", "num_used", "device"),
    [
        (2, (EXPERTS, HIDDEN, INNER), USED, {}),
        (1, (EXPERTS, HIDDEN, INNER), USED, {"arch": "80"}),
        (1, (EXPERTS, HIDDEN, INNER), USED, {"dtype": np.float32}),
        (1, (EXPERTS, HIDDEN, INNER), 33, {}),
        (1, (1025, HIDDEN, INNER), USED, {}),
        (1, (EXPERTS, 6144, INNER), USED, {}),
        (1, (8, 4096, 28672), 2, {}),
    ],
)
def test_other_rows_take_one_operation_after_another(num_rows, sizes, num_used, device):
    x = FakeStack((num_rows, sizes[1]), BFLOAT16)
    assert not one_row.can_take_row(StackLauncher(**device), x, expert_weights(*sizes), Routing(num_used, True))

"""Rows that take one launch for a layer's experts, or for all that follows its attention. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.ops.interface import LayerTail, Routing
from model.ops.weight import ExpertWeights, Weight, WeightFormat
from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher

reason = "needs the packages of the cuda extra"
one_row = pytest.importorskip("model.ops.gpu.experts.one_row", reason=reason, exc_type=ImportError)

EXPERTS, USED, HIDDEN, INNER, ATTENDED, WIDTH = 128, 8, 2048, 768, 4096, 5120
EXCHANGE = FakeStack((one_row.MAX_WORDS,), np.uint64), FakeStack((132,), np.uint32)


def tail_of(hidden: int = HIDDEN, inner: int = INNER, attended: int = ATTENDED, experts: int = EXPERTS) -> LayerTail:
    shapes = (experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)
    norm = FakeStack((hidden,), BFLOAT16)
    return LayerTail(
        output=Weight(FakeStack((hidden, attended), BFLOAT16)),
        output_bias=None,
        norm=norm,
        experts=ExpertWeights(*(Weight(FakeStack(shape, BFLOAT16)) for shape in shapes)),
        next_norm=norm,
        product=Weight(FakeStack((WIDTH, hidden), BFLOAT16)),
        product_bias=None,
        width=WIDTH,
        eps=1e-6,
    )


@pytest.mark.parametrize("is_last", [False, True])
def test_a_tail_takes_one_launch_of_one_build(monkeypatch, is_last):
    seen = []
    monkeypatch.setattr(StackLauncher, "launch", lambda self, name, *_, **build: seen.append((name, build)))
    tail, routing = tail_of(), Routing(USED, True, FakeStack((1,), np.int64), 64)
    if is_last:
        tail = replace(tail, product=None)
    device, out = StackLauncher(), FakeStack((1, HIDDEN if is_last else WIDTH), BFLOAT16)
    x, residual = FakeStack((1, ATTENDED), BFLOAT16), FakeStack((1, HIDDEN), BFLOAT16)
    assert one_row.can_take_tail(device, tail, routing)
    one_row.tail_of_row(device, x, residual, tail, routing, out, EXCHANGE)
    assert [name for name, _ in seen] == ["layer_row"]
    assert seen[0][1]["NEXT_SIZE"] == WIDTH


@pytest.mark.parametrize(
    ("sizes", "num_used", "device"),
    [
        ({}, USED, {"arch": "80"}),
        ({}, USED, {"dtype": np.float32}),
        ({}, 33, {}),
        ({"experts": 1025}, USED, {}),
        ({"hidden": 6144}, USED, {}),
        ({"inner": 28672}, 2, {}),
    ],
)
def test_tails_of_other_sizes_take_one_operation_after_another(sizes, num_used, device):
    assert not one_row.can_take_tail(StackLauncher(**device), tail_of(**sizes), Routing(num_used, True))


def test_quantised_products_take_one_operation_after_another():
    stack = FakeStack((HIDDEN, ATTENDED), np.uint8)
    tail = replace(tail_of(), output=Weight(stack, WeightFormat.FP8, FakeStack((HIDDEN,), np.float32)))
    assert not one_row.can_take_tail(StackLauncher(), tail, Routing(USED, True))


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

"""Layers of experts that take the fused kernels. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.interface import ExpertGroups, Routing
from model.ops.weight import ExpertWeights, Weight, WeightFormat
from tests.support.fake_launcher import BFLOAT16, FakeStack, StackLauncher

reason = "needs the packages of the cuda extra"
fused = pytest.importorskip("model.ops.gpu.experts.fused", reason=reason, exc_type=ImportError)

EXPERTS, USED, HIDDEN, INNER = 128, 8, 2048, 768


def groups_of(num_rows: int, num_used: int = USED) -> ExpertGroups:
    shapes = (num_rows * num_used,), (num_rows, num_used), (EXPERTS + 1,)
    return ExpertGroups(*(FakeStack(shape, np.int32) for shape in shapes))


def stacks_of(hidden: int = HIDDEN, inner: int = INNER) -> tuple[Weight, Weight]:
    shapes = (EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)
    return tuple(Weight(FakeStack(shape, BFLOAT16)) for shape in shapes)


def launch_few(num_rows: int) -> list[str]:
    ops, stacks, groups = StackLauncher(), stacks_of(), groups_of(num_rows)
    assert fused.can_gate(ops, *stacks, groups)
    x, weights = FakeStack((num_rows, HIDDEN), BFLOAT16), FakeStack((num_rows, USED), np.float32)
    assert fused.gate_and_sum(ops, x, stacks, groups, weights).shape == (num_rows, HIDDEN)
    return ops.launched


def test_gated_products_need_no_silu():
    for num_rows in (1, 64):
        assert launch_few(num_rows) == ["experts_gemv", "experts_gemv", "combine_experts"]


def test_many_rows_and_quantised_stacks_are_not_gated():
    gate_up, down = stacks_of()
    in_fp8 = Weight(FakeStack(down.data.shape, np.uint8), WeightFormat.FP8, FakeStack(down.data.shape[:2], np.float32))
    assert not fused.can_gate(StackLauncher(), gate_up, in_fp8, groups_of(1))
    assert not fused.can_gate(StackLauncher(), gate_up, down, groups_of(0))
    assert not fused.can_gate(StackLauncher(), gate_up, down, groups_of(256))
    assert fused.can_gate(StackLauncher(arch="80"), gate_up, down, groups_of(256))


def test_the_previous_launch_has_waited_for_groups_that_are_read_early(monkeypatch):
    seen = []
    monkeypatch.setattr(StackLauncher, "launch", lambda self, name, *_, **defines: seen.append((name, defines)))
    launch_few(2)
    assert [(name, defines.get("GATED"), defines.get("KNOWN")) for name, defines in seen] == [
        ("experts_gemv", 1, 0), ("experts_gemv", 0, 1), ("combine_experts", None, None),
    ]  # fmt: skip


def expert_weights(num_experts: int, hidden: int, inner: int) -> ExpertWeights:
    shapes = (num_experts, hidden), (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    return ExpertWeights(*(Weight(FakeStack(shape, BFLOAT16)) for shape in shapes))


def test_one_row_takes_one_launch():
    ops, x, weights = StackLauncher(), FakeStack((1, HIDDEN), BFLOAT16), expert_weights(EXPERTS, HIDDEN, INNER)
    routing = Routing(USED, True, FakeStack((1,), np.int64), 64)
    assert fused.can_take_row(ops, x, weights, routing)
    norm, arrived = (FakeStack((HIDDEN,), BFLOAT16), 1e-6), FakeStack((1,), np.uint32)
    out = fused.experts_of_row(ops, (x, x), norm, weights, routing, arrived)
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
    assert not fused.can_take_row(StackLauncher(**device), x, expert_weights(*sizes), Routing(num_used, True))

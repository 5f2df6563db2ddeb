"""Layers of experts that take the fused kernels. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.interface import ExpertGroups
from model.ops.weight import Weight, WeightFormat
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

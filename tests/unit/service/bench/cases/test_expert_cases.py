"""Cases of experts: every operation runs, and reads the experts in use once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.families.configs.family import ExpertsConfig
from model.ops.cpu.ops import NumpyOps
from service.bench.cases.expert_cases import ExpertCases

EXPERTS = ExpertsConfig(num_experts=6, num_used=2, intermediate_size=16, renormalises=True, layers=(True,))


def test_every_operation_of_a_layer_runs_at_every_size():
    cases = list(ExpertCases(NumpyOps(), EXPERTS, 32, (1, 9)).all())
    assert [case.op for case in cases[:8]] == [
        *("route_to_groups", "route_experts", "group_by_expert"),
        *("experts_linear",) * 4,
        "combine_experts",
    ]
    assert len(cases) == 16
    for case in cases:
        result = case.make(0)()
        if case.op == "experts_linear":
            assert np.isfinite(result).all()
            assert case.num_flops == 2 * result.size * (32 if "gate_up" in case.size else 16)


def test_4_bit_weights_are_multiplied_where_their_groups_fit():
    experts = replace(EXPERTS, intermediate_size=128)
    cases = list(ExpertCases(NumpyOps(), experts, 256, (2,)).all())
    in_int4 = [case for case in cases if "int4" in case.size]
    assert [case.size.split()[0] for case in in_int4] == ["gate_up", "down"]
    for case in in_int4:
        assert np.isfinite(case.make(1)()).all()


def test_bytes_count_the_experts_in_use():
    one, many = (next(c for c in ExpertCases(NumpyOps(), EXPERTS, 32, (n,)).all() if c.num_flops) for n in (1, 64))
    assert one.num_bytes == 4 * (2 * 32 * 32 + 2 * (32 + 32))
    assert many.num_bytes == 4 * (6 * 32 * 32 + 128 * (32 + 32))

"""Phi's fused matrices and ropes."""

from __future__ import annotations

from typing import Any

import pytest

from model.errors import ModelError
from model.ops.interface import NO_WINDOW
from model.weights.checkpoint import expected_shapes
from tests.support.family_configs import read_family

LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


def test_q_k_v_and_gate_up_are_one_tensor_each():
    shapes = expected_shapes(read_family("phi3"))
    assert shapes["model.layers.3.self_attn.qkv_proj.weight"] == ((4 + 2 + 2) * 16, 64)
    assert shapes["model.layers.3.mlp.gate_up_proj.weight"] == (2 * 96, 64)
    assert not any("q_proj" in name or "up_proj.bias" in name for name in shapes)


def test_longrope_of_part_of_a_head():
    for kind in ("longrope", "su"):
        config = read_family(
            "phi3",
            partial_rotary_factor=0.75,
            original_max_position_embeddings=64,
            rope_scaling={**LONGROPE, "type": kind},
            sliding_window=262144,
        )
        assert (config.rope.kind, config.rope.rotary_dim(16), config.rope.factor) == ("longrope", 12, 4.0)
        assert (config.max_position, config.windows) == (256, (262144,) * 4)
    assert read_family("phi3", sliding_window=None).windows == (NO_WINDOW,) * 4


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rope_type", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("short_factor", {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 8}}),
        ("long_factor", {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 5 + [0]}}),
        ("long_factor", {"rope_scaling": {**LONGROPE, "long_factor": None}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.7}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.01}),
    ],
)
def test_refusals_name_the_field(name: str, changes: dict[str, Any]):
    with pytest.raises(ModelError, match=f"{name}: "):
        read_family("phi3", **{"partial_rotary_factor": 0.75, **changes})


def test_other_families_rotate_whole_heads():
    with pytest.raises(ModelError, match="partial_rotary_factor: only 1 is supported"):
        read_family("llama", partial_rotary_factor=0.5)
    with pytest.raises(ModelError, match="rope_type: 'longrope' is not supported"):
        read_family("llama", rope_scaling=LONGROPE)

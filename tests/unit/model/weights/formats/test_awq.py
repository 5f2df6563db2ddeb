"""AWQ: which modules are quantised, by AutoAWQ's and GPTQModel's configs."""

from __future__ import annotations

from typing import Any

import pytest

from model.config_fields import Fields
from model.weights.formats.awq import AwqScheme, read_awq

GATE = "model.layers.1.mlp.experts.3.gate_proj"
Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("module", "config", "group_size", "may_be_dense"),
    [
        (GATE, {}, 128, False),
        ("lm_head", {}, 128, True),
        (GATE, {"modules_to_not_convert": ["gate"]}, 128, True),  # AutoAWQ compares parts of names, others whole ones
        (Q, {"modules_to_not_convert": ["gate"]}, 128, False),
        (Q, {"modules_to_not_convert": ["self_attn"]}, None, True),
        (Q, {"dynamic": {r"-:.*attn.*": {}}}, None, False),
        (GATE, {"dynamic": {r"-:.*attn.*": {}, r"+:.*experts.*": {"group_size": 64}}}, 64, False),
        (GATE, {"q_group_size": 32}, 32, False),
    ],
)
def test_the_scheme_of_a_module(module: str, config: dict[str, Any], group_size: int | None, may_be_dense: bool):
    quantisation = read_awq(Fields({"quant_method": "awq", **config}, "config.json"))
    expected = None if group_size is None else AwqScheme(group_size, True)
    assert quantisation.scheme_of(module) == expected
    assert quantisation.may_be_dense(module) is may_be_dense

"""Fields of a rope that no family's own test reads."""

from __future__ import annotations

import pytest

from model.config_fields import Fields
from model.errors import ModelError
from model.rope_config import RopeConfig, RopeRules, read_rope


def read(scaling: dict[str, object], rules: RopeRules | None = None) -> tuple[RopeConfig, int]:
    fields = Fields({"max_position_embeddings": 1024}, "config.json")
    return read_rope(fields, Fields(scaling, "config.json: rope_scaling"), 64, rules or RopeRules())


def test_theta_is_the_section_s_else_the_model_s_else_the_family_s():
    assert read({"rope_theta": 7.0})[0].theta == 7.0
    assert read({})[0].theta == 10000.0
    assert read({}, RopeRules(default_theta=5.0))[0].theta == 5.0


def test_scaled_queries_need_the_original_length():
    rules = RopeRules(scales_queries=True)
    rope, _ = read({"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 32}, rules)
    assert (rope.query_beta, rope.original_max_position) == (0.5, 32)
    assert read({"llama_4_scaling_beta": 0.5})[0] == read({})[0], "families that do not scale ignore it"


def test_rotary_dimensions_are_a_share_of_the_head():
    rope, _ = read({"partial_rotary_factor": 0.75}, RopeRules(is_partial=True))
    assert rope.rotary_dim(64) == 48
    with pytest.raises(ModelError, match=r"config\.json: rope_scaling: partial_rotary_factor"):
        read({"partial_rotary_factor": 0.75})

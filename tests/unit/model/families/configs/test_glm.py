"""GLM's partial rope."""

from __future__ import annotations

import pytest

from tests.support.family_configs import read_family


@pytest.mark.parametrize(("fields", "fraction"), [({}, 0.5), ({"partial_rotary_factor": 0.25}, 0.25)])
def test_a_part_of_each_head_rotates(fields: dict[str, float], fraction: float):
    config = read_family("glm", head_dim=32, **fields)
    assert (config.rope.rotary_fraction, config.rope.is_interleaved) == (fraction, True)
    assert (config.qkv_bias, config.output_bias) == (True, False)

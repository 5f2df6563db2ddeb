"""CWM's windows and the rope of a config without one."""

from __future__ import annotations

from model.ops.interface import NO_WINDOW
from tests.support.family_configs import read_family


def test_the_first_of_four_layers_has_no_window():
    assert read_family("cwm").windows == (NO_WINDOW, 8192, 8192, 8192)
    assert read_family("cwm", sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2).windows == (
        *(16, NO_WINDOW),
        *(16, NO_WINDOW),
    )


def test_a_config_without_a_rope_has_the_published_one():
    rope = read_family("cwm").rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("llama3", 1e6, 16.0, 8192)
    plain = read_family("cwm", rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope
    assert (plain.kind, plain.theta) == ("default", 5e5)


def test_only_the_mlp_may_have_biases():
    config = read_family("cwm", attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, True)

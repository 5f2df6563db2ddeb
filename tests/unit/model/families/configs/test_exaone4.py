"""EXAONE 4's windows and ropes."""

from __future__ import annotations

import pytest

from model.errors import ModelError
from model.ops.interface import NO_WINDOW
from tests.support.family_configs import read_family

TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def test_with_a_window_only_layers_that_slide_rotate():
    config = read_family("exaone4", sliding_window=16, layer_types=TYPES, sliding_window_pattern="LLLG")
    assert config.windows == (16, 16, NO_WINDOW, 16)
    assert [rope.kind for rope in config.ropes] == ["default", "default", "none", "default"]


def test_the_pattern_counts_without_layer_types():
    assert read_family("exaone4", sliding_window=16).windows == (16, 16, 16, NO_WINDOW)
    assert read_family("exaone4").windows == (4096, 4096, 4096, NO_WINDOW)
    assert read_family("exaone4", sliding_window_pattern=2).windows == (4096, NO_WINDOW) * 2


def test_without_a_window_all_layers_rotate():
    config = read_family("exaone4", sliding_window=None, sliding_window_pattern=None)
    assert (config.windows, config.layer_ropes) == ((NO_WINDOW,) * 4, ())


def test_layers_that_slide_need_a_window():
    with pytest.raises(ModelError, match="sliding_window: missing, but layer_types has sliding_attention"):
        read_family("exaone4", sliding_window=None, layer_types=TYPES)

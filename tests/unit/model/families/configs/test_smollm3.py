"""SmolLM3: 1 in no_rope_layers means rope."""

from __future__ import annotations

import pytest

from model.errors import ModelError
from model.ops.interface import NO_WINDOW
from tests.support.family_configs import read_family


def kinds(**fields: object) -> list[str]:
    return [rope.kind for rope in read_family("smollm3", **fields).ropes]


def test_one_means_rotated():
    assert kinds(no_rope_layers=[1, 0, 0, 1]) == ["default", "none", "none", "default"]
    assert kinds(no_rope_layers=[1, 1, 1, 0, 1, 1]) == ["default", "default", "default", "none"]


def test_the_interval_counts_layers_without():
    assert kinds() == ["default", "default", "default", "none"]
    assert kinds(no_rope_layer_interval=2) == ["default", "none"] * 2


@pytest.mark.parametrize("flags", [[1, 0], "1111", [1, 0, 2, 1], [True, "x", 0, 0]])
def test_other_flags_are_refused(flags: object):
    with pytest.raises(ModelError, match="no_rope_layers: not 4 times 0 or 1"):
        read_family("smollm3", no_rope_layers=flags)


def test_unrotated_layers_slide_where_windows_are_used():
    assert read_family("smollm3", use_sliding_window=True, sliding_window=8).windows == (*(NO_WINDOW,) * 3, 8)
    assert read_family("smollm3", sliding_window=8).windows == (NO_WINDOW,) * 4


def test_embeddings_are_tied_unless_the_config_says_otherwise():
    assert read_family("smollm3").tied_embeddings
    assert not read_family("smollm3", tie_word_embeddings=False).tied_embeddings

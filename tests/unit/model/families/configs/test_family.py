"""Readers that several families share."""

from __future__ import annotations

import pytest

from model.config_fields import Fields
from model.errors import ModelError
from model.families.configs.family import layer_types, no_windows, window_of_all, windows_of_types
from model.ops.interface import NO_WINDOW


def fields(**raw: object) -> Fields:
    return Fields({"model_type": "mistral", **raw}, "config.json")


def test_windows_of_all_layers():
    assert window_of_all(fields(sliding_window=24), 2) == (24, 24)
    assert window_of_all(fields(sliding_window=None), 2) == (NO_WINDOW, NO_WINDOW)


def test_mixed_attention_is_refused_where_a_family_has_none():
    mixed = fields(layer_types=["full_attention", "sliding_attention"])
    for read in (no_windows, window_of_all):
        with pytest.raises(ModelError, match="layer_types: mixed attention is not supported for mistral"):
            read(mixed, 2)
    assert no_windows(fields(layer_types=["full_attention"] * 2), 2) == (NO_WINDOW,) * 2


@pytest.mark.parametrize("kinds", ["full_attention", [], ["full_attention"], ["full_attention", "linear_attention"]])
def test_layer_types_name_each_layer(kinds: object):
    with pytest.raises(ModelError, match="layer_types: not 2 times one of full_attention, sliding_attention"):
        layer_types(fields(layer_types=kinds), 2)


def test_windows_of_types():
    assert windows_of_types(["sliding_attention", "full_attention"], 8) == (8, NO_WINDOW)

"""EXAONE 4: norms after attention and MLP, and per head of q and k; with a window, only sliding layers rotate."""

from __future__ import annotations

from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import (
    NORM_AFTER,
    Family,
    full_attention_every,
    layer_types,
    no_biases,
    windows_of_types,
)
from model.rope_config import RopeConfig


def _window(fields: Fields) -> int | None:
    """Read `sliding_window`; a null means full attention, an absent field 4096, as in transformers."""
    window: int | None = fields.integer(
        "sliding_window", None if "sliding_window" in fields.raw else 4096, high=NO_WINDOW - 1
    )
    return window


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    kinds, window = layer_types(fields, num_layers), _window(fields)
    if window is None:
        if "sliding_attention" in (kinds or ()):
            raise fields.error("sliding_window", "missing, but layer_types has sliding_attention")
        return (NO_WINDOW,) * num_layers
    if kinds is None:
        pattern = fields.integer("sliding_window_pattern", 4, high=1 << 10)
        kinds = full_attention_every(pattern, num_layers)
    return windows_of_types(kinds, window)


def _ropes(fields: Fields, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig, ...]:
    if _window(fields) is None:
        return ()
    unrotated = RopeConfig(kind="none", theta=rope.theta)
    return tuple(unrotated if window == NO_WINDOW else rope for window in windows)


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    tensors=NORM_AFTER,
    biases=no_biases,
    qk_norm=True,
    norm_after=True,
    windows=_windows,
    ropes=_ropes,
)

"""Rotary position embedding as a configuration spells it, in the words of transformers 4 and of transformers 5."""

from __future__ import annotations

from dataclasses import dataclass

from model.config_fields import Fields

MAX_POSITION = 1 << 24
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `kind` names the scaling; only the fields of that kind are set."""

    kind: str  # "default" | "linear" | "dynamic" | "llama3" | "yarn"
    theta: float
    factor: float = 1.0
    original_max_position: int | None = None  # dynamic, llama3, yarn
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


def read_rope(fields: Fields) -> tuple[RopeConfig, int]:
    """(the embedding, the longest sequence it makes possible) of a config.json. Raises ModelError.

    Linear and dynamic scaling stretch max_position_embeddings by their factor, yarn its own original length; llama3's
    max_position_embeddings already is the stretched length.
    """
    max_position = fields.integer("max_position_embeddings", high=MAX_POSITION)
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.source)
    if any(isinstance(value, dict) for value in scaling.raw.values()):
        raise scaling.error("rope_parameters", "rotary parameters per layer type are not supported")
    for section in (fields, scaling):
        if section.number("partial_rotary_factor", 1.0, high=1) != 1.0:
            raise section.error("partial_rotary_factor", "only 1 is supported")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    theta = scaling.number("rope_theta", None, above=1, high=1e12) or fields.number(
        "rope_theta", 10000.0, above=1, high=1e12
    )
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta), max_position
    if kind not in ROPE_KINDS:
        raise scaling.error("rope_type", f"{kind!r} is not supported (known: {', '.join(ROPE_KINDS)})")
    original = fields.integer("original_max_position_embeddings", None, high=MAX_POSITION) or scaling.integer(
        "original_max_position_embeddings", max_position, high=MAX_POSITION
    )
    if kind == "yarn":
        return _yarn(scaling, theta, max_position, original)
    factor = scaling.number("factor", low=1, high=1e4)
    if kind == "llama3":
        return _llama3(scaling, theta, factor, original), max_position
    rope = RopeConfig(kind=kind, theta=theta, factor=factor, original_max_position=max_position)
    return rope, min(int(max_position * factor), MAX_POSITION)


def _llama3(scaling: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    low = scaling.number("low_freq_factor", above=0, high=1e6)
    high = scaling.number("high_freq_factor", above=0, high=1e6)
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, theta: float, max_position: int, original: int) -> tuple[RopeConfig, int]:
    factor = scaling.number("factor", max(max_position / original, 1.0), low=1, high=1e4)
    beta_fast = scaling.number("beta_fast", 32.0, above=0, high=1e6)
    beta_slow = scaling.number("beta_slow", 1.0, above=0, high=1e6)
    if beta_fast < beta_slow:
        raise scaling.error("beta_fast", f"{beta_fast:g} is below beta_slow {beta_slow:g}")
    rope = RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=scaling.number("attention_factor", None, above=0, high=1e3),
        mscale=scaling.number("mscale", None, high=1e3),
        mscale_all_dim=scaling.number("mscale_all_dim", None, high=1e3),
        truncate=scaling.boolean("truncate", True),
    )
    return rope, min(int(original * factor), MAX_POSITION)

"""Rotary position embeddings (ropes) of config.json, in the spelling of transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config_fields import Fields
from model.errors import ModelError

MAX_POSITION = 1 << 24
OLD_KINDS = {"su": "longrope"}
COMMON_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""Scalings of families that name none."""

SECTIONS = ("rope_scaling", "rope_parameters")
"""Name of the section in transformers 4, and in 5, which puts `rope_theta` in it."""

OVERRIDES = (*SECTIONS, "rope_theta", "max_position_embeddings")
"""Fields that a command line may replace."""

WRAPPED = "text_config"
FLAG = "--hf-overrides"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """A rope. `kind` is its scaling; only the fields of that kind are set."""

    kind: str  # "default" | "linear" | "dynamic" | "llama3" | "yarn" | "longrope" | "none": nothing is rotated
    theta: float
    rotary_fraction: float = 1.0  # of a head's dimensions; others are not rotated
    is_interleaved: bool = False  # rotate dimension 2 i with 2 i + 1, not i with i + D / 2
    query_beta: float = 0.0  # multiply q at position p by 1 + query_beta * log(1 + p // original_max_position)
    factor: float = 1.0
    original_max_position: int = 0  # dynamic, llama3, yarn, longrope; any kind with query_beta
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: divide the frequencies up to original_max_position
    long_factors: tuple[float, ...] = ()  # longrope: beyond it

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.rotary_fraction)


@dataclass(frozen=True, kw_only=True)
class RopeRules:
    """Rope fields that a family reads in addition to Llama's."""

    kinds: tuple[str, ...] = COMMON_KINDS
    is_partial: bool = False  # partial_rotary_factor
    default_rotary_fraction: float = 1.0
    is_interleaved: bool = False
    scales_queries: bool = False  # llama_4_scaling_beta
    default_theta: float = 10000.0


def read_rope(fields: Fields, scaling: Fields, head_dim: int, rules: RopeRules) -> tuple[RopeConfig, int]:
    """Return the rope that `scaling` describes and the longest sequence. Raises ModelError.

    Linear and dynamic scaling multiply max_position_embeddings by their factor, yarn its original length. The
    max_position_embeddings of llama3 and longrope is already scaled.
    """
    max_position = fields.integer("max_position_embeddings", high=MAX_POSITION)
    if any(isinstance(value, dict) for value in scaling.raw.values()):
        raise scaling.error("rope_parameters", "rotary parameters per layer type are not supported")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = OLD_KINDS.get(kind, kind)
    if kind != "default" and kind not in rules.kinds:
        raise scaling.error("rope_type", f"{kind!r} is not supported (known: {', '.join(rules.kinds)})")
    theta = scaling.number("rope_theta", None, above=1, high=1e12) or fields.number(
        "rope_theta", rules.default_theta, above=1, high=1e12
    )
    fraction = _rotary_fraction(fields, scaling, head_dim, rules)
    plain = RopeConfig(kind=kind, theta=theta, rotary_fraction=fraction, is_interleaved=rules.is_interleaved)
    original = fields.integer("original_max_position_embeddings", None, high=MAX_POSITION) or scaling.integer(
        "original_max_position_embeddings", max_position, high=MAX_POSITION
    )
    rope, longest = _scaled(plain, scaling, max_position, original, head_dim)
    beta = scaling.number("llama_4_scaling_beta", 0.0, high=1e3) if rules.scales_queries else 0.0
    return (replace(rope, query_beta=beta, original_max_position=original) if beta else rope), longest


def _scaled(
    plain: RopeConfig, scaling: Fields, max_position: int, original: int, head_dim: int
) -> tuple[RopeConfig, int]:
    if plain.kind == "default":
        return plain, max_position
    if plain.kind == "longrope":
        return _longrope(plain, scaling, max_position, original, head_dim), max_position
    if plain.kind == "yarn":
        return _yarn(plain, scaling, max_position, original)
    rope = replace(plain, factor=scaling.number("factor", low=1, high=1e4))
    if plain.kind == "llama3":
        return _llama3(rope, scaling, original), max_position
    rope = replace(rope, original_max_position=max_position)
    return rope, min(int(max_position * rope.factor), MAX_POSITION)


def _rotary_fraction(fields: Fields, scaling: Fields, head_dim: int, rules: RopeRules) -> float:
    fraction = rules.default_rotary_fraction
    for section in (fields, scaling):
        value = section.number("partial_rotary_factor", None, above=0, high=1)
        if value not in (None, 1.0) and not rules.is_partial:
            raise section.error("partial_rotary_factor", "only 1 is supported")
        fraction = fraction if value is None else value
    if int(head_dim * fraction) % 2 or int(head_dim * fraction) < 2:
        raise fields.error("partial_rotary_factor", f"{fraction:g} of head_dim {head_dim} is odd or 0")
    return fraction


def _llama3(rope: RopeConfig, scaling: Fields, original: int) -> RopeConfig:
    low = scaling.number("low_freq_factor", above=0, high=1e6)
    high = scaling.number("high_freq_factor", above=0, high=1e6)
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    return replace(rope, original_max_position=original, low_freq_factor=low, high_freq_factor=high)


def _yarn(plain: RopeConfig, scaling: Fields, max_position: int, original: int) -> tuple[RopeConfig, int]:
    factor = scaling.number("factor", max(max_position / original, 1.0), low=1, high=1e4)
    beta_fast = scaling.number("beta_fast", 32.0, above=0, high=1e6)
    beta_slow = scaling.number("beta_slow", 1.0, above=0, high=1e6)
    if beta_fast < beta_slow:
        raise scaling.error("beta_fast", f"{beta_fast:g} is below beta_slow {beta_slow:g}")
    rope = replace(
        plain,
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


def _longrope(plain: RopeConfig, scaling: Fields, max_position: int, original: int, head_dim: int) -> RopeConfig:
    """LongRoPE (Ding et al.): a factor per frequency, in one list up to the original length and another beyond it."""
    num_factors = plain.rotary_dim(head_dim) // 2
    return replace(
        plain,
        factor=scaling.number("factor", max(max_position / original, 1.0), low=1, high=1e4),
        original_max_position=original,
        attention_factor=scaling.number("attention_factor", None, above=0, high=1e3),
        short_factors=_factors(scaling, "short_factor", num_factors),
        long_factors=_factors(scaling, "long_factor", num_factors),
    )


def _factors(scaling: Fields, name: str, count: int) -> tuple[float, ...]:
    values = scaling.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise scaling.error(name, f"is not a list of {count} numbers")
    if any(type(value) not in (int, float) or not 0 < value <= 1e6 for value in values):
        raise scaling.error(name, "holds no number, or one outside above 0..1e6")
    return tuple(map(float, values))


def first_unknown(overrides: Mapping[str, Any]) -> str | None:
    """Return the first field that may not be replaced, or None."""
    for key, value in overrides.items():
        if key == WRAPPED and isinstance(value, dict):
            if (inner := next((each for each in value if each not in OVERRIDES), None)) is not None:
                return f"{WRAPPED}.{inner}"
        elif key not in OVERRIDES:
            return key
    return None


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with `overrides`, in either spelling of transformers.

    A section is replaced as a whole but keeps its `rope_theta`. Raises ModelError if the config's layers have different
    sections, or if a text_config in `overrides` is missing in it.
    """
    if not overrides:
        return dict(raw)
    inner = raw.get(WRAPPED)
    if isinstance(inner, dict):
        own = {key: value for key, value in overrides.items() if key != WRAPPED}
        return {**raw, WRAPPED: with_overrides(inner, own | overrides.get(WRAPPED, {}))}
    if WRAPPED in overrides:
        raise ModelError(f"{FLAG}: {WRAPPED}: config.json has none")
    replaced = dict(raw)
    for section in SECTIONS:
        found = replaced.get(section)
        if not isinstance(found, dict):
            continue
        if any(isinstance(value, dict) for value in found.values()):
            raise ModelError(f"{FLAG}: {section} differs by layer type: edit config.json in a copy of the folder")
        if "rope_theta" in found:
            replaced["rope_theta"] = found["rope_theta"]
            replaced[section] = {key: value for key, value in found.items() if key != "rope_theta"}
    if any(section in overrides for section in SECTIONS):
        replaced = {key: value for key, value in replaced.items() if key not in SECTIONS}
    return replaced | dict(overrides)

"""Rotary position embedding tables (Su et al., RoFormer), plain or stretched."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from model.rope_config import RopeConfig


class RopeTables:
    """Rows of cos and sin, float32[max_model_len + short_len, head_dim / 2], times the attention factor of yarn and
    longrope.

    Row p is position p of a sequence of up to `max_model_len` tokens. Row max_model_len + p is that of a sequence of up
    to `short_len` tokens, for which "dynamic" ropes are not stretched and longrope has its short factors. A sequence
    keeps one kind of rows: cached rotated keys cannot change as it grows. Pairs beyond the rotated dimensions get cos
    1.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int, short_len: int = 0):
        self.shape = (max_model_len + short_len, head_dim // 2)
        self._max_model_len = max_model_len
        self._frequencies, self._short_frequencies = (
            _rounded_frequencies(rope, head_dim, length) for length in (max_model_len, short_len)
        )
        self._factor = np.float32(attention_factor(rope))

    def cos(self, first: int, last: int) -> np.ndarray:
        """Return rows first..last - 1."""
        rows = np.ones((last - first, self.shape[1]), np.float32)
        rows[:, : len(self._frequencies)] = np.cos(self._angles(first, last)) * self._factor
        return rows

    def sin(self, first: int, last: int) -> np.ndarray:
        """Return rows first..last - 1."""
        rows = np.zeros((last - first, self.shape[1]), np.float32)
        rows[:, : len(self._frequencies)] = np.sin(self._angles(first, last)) * self._factor
        return rows

    def _angles(self, first: int, last: int) -> np.ndarray:
        middle, start = min(max(first, self._max_model_len), last), self._max_model_len
        angles = np.outer(np.arange(first, middle, dtype=np.float32), self._frequencies)
        if middle == last:
            return angles
        short = np.outer(np.arange(middle - start, last - start, dtype=np.float32), self._short_frequencies)
        return np.concatenate([angles, short])


def _rounded_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> np.ndarray:
    """Return float32[any], rounded as in training."""
    if rope.kind == "none":
        return np.zeros(0, np.float32)
    return inverse_frequencies(rope, rope.rotary_dim(head_dim), max_model_len).astype(np.float32)


def short_length(ropes: Iterable[RopeConfig], max_model_len: int) -> int:
    """Return the most tokens of a sequence whose rope differs from that of `max_model_len`; 0: no rope depends on
    length."""
    lengths = [rope.original_max_position for rope in ropes if rope.kind in ("dynamic", "longrope")]
    shortest = min(lengths, default=0)
    return shortest if shortest < max_model_len else 0


def rope_tables(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows of cos and of sin, as in `RopeTables`."""
    tables = RopeTables(rope, head_dim, max_model_len)
    return tables.cos(0, max_model_len), tables.sin(0, max_model_len)


def query_scale(rope: RopeConfig, max_model_len: int) -> np.ndarray | None:
    """Return the factor of q at each position, float32[max_model_len], or None if it is 1."""
    if not rope.query_beta or max_model_len <= rope.original_max_position:
        return None
    turns = np.arange(max_model_len) // rope.original_max_position
    return np.asarray(1 + rope.query_beta * np.log1p(turns), np.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> np.ndarray:
    """Return radians per position of the rotated dimensions, float64[head_dim / 2], fastest first."""
    if rope.kind == "linear":
        return _plain(rope.theta, head_dim) / rope.factor
    if rope.kind == "dynamic":
        return _dynamic(rope, head_dim, max_model_len)
    if rope.kind == "llama3":
        return _llama3(rope, head_dim)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "longrope":
        is_long = max_model_len > rope.original_max_position
        factors = np.array(rope.long_factors if is_long else rope.short_factors)
        return np.asarray(_plain(rope.theta, head_dim) / factors)
    return _plain(rope.theta, head_dim)


def attention_factor(rope: RopeConfig) -> float:
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _plain(theta: float, head_dim: int) -> np.ndarray:
    return np.asarray(theta ** -(np.arange(0, head_dim, 2) / head_dim))


def _dynamic(rope: RopeConfig, head_dim: int, max_model_len: int) -> np.ndarray:
    """NTK-aware: a larger base stretches the slowest frequency by the whole factor, the fastest not at all."""
    stretch = rope.factor * max(max_model_len / rope.original_max_position, 1.0) - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Stretch long waves by the factor, keep short ones, interpolate in between."""
    plain = _plain(rope.theta, head_dim)
    waves_in_original = rope.original_max_position * plain / (2 * math.pi)
    kept = (waves_in_original - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return plain * kept + plain / rope.factor * (1 - kept)


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN (Peng et al.): stretch below beta_slow turns in the original length, keep above beta_fast, else ramp."""
    plain = _plain(rope.theta, head_dim)
    first = _dimension_of_turns(rope, head_dim, rope.beta_fast)
    last = _dimension_of_turns(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # as published: a ramp of no width is a step
    stretched = np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)
    return np.asarray(plain * (1 - stretched) + plain / rope.factor * stretched)


def _dimension_of_turns(rope: RopeConfig, head_dim: int, num_turns: float) -> float:
    turns_ratio = rope.original_max_position / (num_turns * 2 * math.pi)
    return head_dim * math.log(turns_ratio) / (2 * math.log(rope.theta))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

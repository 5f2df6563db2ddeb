"""Figures measured by a suite, printed at its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FIGURES: dict[str, str] = {}


def note(name: str, value: str) -> None:
    _FIGURES[name] = value


def note_percentiles(name: str, seconds: Sequence[float]) -> None:
    """Note median, 99th percentile and maximum."""
    median, p99 = np.percentile(seconds, [50, 99])
    _FIGURES[name] = f"p50 {median:.2f} s, p99 {p99:.2f} s, max {max(seconds):.2f} s of {len(seconds)}"


def noted() -> dict[str, str]:
    return dict(_FIGURES)

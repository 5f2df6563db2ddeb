from __future__ import annotations

import time
from collections.abc import Callable

WEIGHT = 0.1
"""Weight of the last call in the mean."""
MAX_EXCESS = 2.0
"""Longer calls count as this many times the mean: the machine had other work."""
HALF_LIFE_S = 10.0
"""Without a call the mean halves: it was that of another batch."""


class DraftTime:
    """Mean seconds to draft one token for all sequences."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._num_calls = 0
        self._mean_s = self._last_s = 0.0

    @property
    def token_s(self) -> float:
        """0 until two calls were seen: the first is slow."""
        age_s = self._clock() - self._last_s
        return float(self._mean_s * 0.5 ** (age_s / HALF_LIFE_S))

    def add(self, seconds: float) -> None:
        self._num_calls += 1
        self._last_s = self._clock()
        if self._num_calls == 2:
            self._mean_s = seconds
        elif self._num_calls > 2:
            seconds = min(seconds, MAX_EXCESS * self._mean_s)
            self._mean_s += max(WEIGHT, 1 / (self._num_calls - 1)) * (seconds - self._mean_s)

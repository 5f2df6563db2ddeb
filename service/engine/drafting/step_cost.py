"""Step times, measured from the model at start and corrected by each step, and drafting times."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

STEP_WEIGHT = 0.1
"""Weight of the last step in means, after ten steps."""
MAX_EXCESS = 2.0
"""Longer times are clipped to this multiple of the expected time: the machine had other work."""
EXCESS_DECAY, FADE = 0.97, 0.98
"""Decay of earlier steps with drafts, per step with and without drafts; FADE stops at the weight of one step."""
QUICKER, QUICKER_DECAY = 0.5, 0.2
"""If a step with drafts beats its expected time by QUICKER of a plain step, earlier steps keep only the weight
QUICKER_DECAY: they waited for kernels to load, or for the processor."""
ORIGIN_WEIGHT = 0.1
"""Weight of 0 s at 0 rows, so that a single observed size gives a proportion."""
HALF_LIFE_S = 10.0
"""Half-life of the mean drafting time without calls, as it was measured with another batch."""


class StepCost:
    """Seconds between the tokens of two steps; steps without drafts overlap."""

    def __init__(self, rows: Seq[int], seconds: Seq[float]):
        """`seconds`: of a forward pass with each number of `rows`, ascending."""
        self._forward = np.interp(np.arange(rows[-1] + 1), rows, seconds)  # by rows
        self._forward_by_rows: list[float] = self._forward.tolist()  # read in each step
        self._overhead_s = 0.0
        self._plain: dict[int, tuple[float, int]] = {}  # (seconds, count) of steps without drafts, by rows
        self._excess = _Excess()

    def plain_s(self, num_rows: int) -> float:
        seen = self._plain.get(num_rows)
        return self._one_forward_s(num_rows) + self._overhead_s if seen is None else seen[0]

    def hoped_s(self, num_rows: int, num_drafts: int) -> float:
        """Return the seconds of a step whose drafts only add to its forward pass."""
        added_s = self._one_forward_s(num_rows + num_drafts) - self._one_forward_s(num_rows)
        return self.plain_s(num_rows) + added_s

    def drafted_s(self, num_rows: int, most: int, *, with_excess: bool = True) -> np.ndarray:
        """Return float64[most]: seconds of steps with 1 to `most` drafts."""
        sizes = np.arange(num_rows + 1, num_rows + most + 1)
        seconds = self._forward_s(sizes)
        seconds += self.plain_s(num_rows) - self._one_forward_s(num_rows)
        if with_excess:
            origin_s, row_s = self._excess.line()
            seconds += np.maximum(0.0, origin_s + row_s * sizes)
        return seconds

    def excess_s(self, num_rows: int) -> float:
        origin_s, row_s = self._excess.line()
        return max(0.0, origin_s + row_s * num_rows)

    def on_step(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        plain_s = self.plain_s(num_rows)
        if num_drafts:
            size, hoped_s = num_rows + num_drafts, self.hoped_s(num_rows, num_drafts)
            excess_s = self.excess_s(size)
            seconds = min(seconds, MAX_EXCESS * (hoped_s + excess_s))
            if hoped_s + excess_s - seconds > QUICKER * plain_s:
                self._excess.scale(QUICKER_DECAY)
            self._excess.add(size, seconds - hoped_s)
            return
        self._excess.fade()
        if not self._plain:
            self._excess.shift(plain_s - seconds)  # it was counted from a guess
        count = self._plain[num_rows][1] if num_rows in self._plain else 0
        if count:
            seconds = min(seconds, MAX_EXCESS * plain_s)
        mean_s = plain_s + max(STEP_WEIGHT, 1 / (count + 1)) * (seconds - plain_s)
        self._plain[num_rows] = mean_s, count + 1
        excess_s = seconds - self._one_forward_s(num_rows) - self._overhead_s
        self._overhead_s = max(0.0, self._overhead_s + STEP_WEIGHT * excess_s)

    def _one_forward_s(self, num_rows: int) -> float:
        """Extrapolate proportionally beyond the largest size."""
        largest = len(self._forward_by_rows) - 1
        return self._forward_by_rows[min(num_rows, largest)] * max(1.0, num_rows / largest)

    def _forward_s(self, num_rows: np.ndarray) -> np.ndarray:
        largest = len(self._forward) - 1
        forward: np.ndarray = self._forward[np.minimum(num_rows, largest)] * np.maximum(1.0, num_rows / largest)
        return forward


class _Excess:
    """Line of seconds over rows: time that drafts add beyond their forward pass (exposed host work and attention)."""

    def __init__(self) -> None:
        self._sums = [ORIGIN_WEIGHT, 0.0, 0.0, 0.0, 0.0]
        """Sums of weight, x, x^2, y and xy."""

    def line(self) -> tuple[float, float]:
        """Return the seconds at 0 rows and per row."""
        weight, x, xx, y, xy = self._sums
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 0 else 0.0
        return (y - slope * x) / weight, slope

    def shift(self, seconds: float) -> None:
        """Add `seconds` to all observed steps."""
        weight, x, _, y, xy = self._sums
        self._sums[3:] = y + (weight - ORIGIN_WEIGHT) * seconds, xy + x * seconds

    def fade(self) -> None:
        if self._sums[0] > 1:
            self.scale(FADE)

    def scale(self, factor: float) -> None:
        self._sums = [factor * total for total in self._sums]

    def add(self, num_rows: int, seconds: float) -> None:
        added = 1 + (1 - EXCESS_DECAY) * ORIGIN_WEIGHT, num_rows, num_rows**2, seconds, num_rows * seconds
        self._sums = [EXCESS_DECAY * total + more for total, more in zip(self._sums, added, strict=True)]


class DraftTime:
    """Mean seconds to draft one token for all sequences."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._num_calls = 0
        self._mean_s = self._last_s = 0.0

    @property
    def token_s(self) -> float:
        """Mean seconds; 0 until the second call, as the first is slow."""
        age_s = self._clock() - self._last_s
        return float(self._mean_s * 0.5 ** (age_s / HALF_LIFE_S))

    def add(self, seconds: float) -> None:
        self._num_calls += 1
        self._last_s = self._clock()
        if self._num_calls == 2:
            self._mean_s = seconds
        elif self._num_calls > 2:
            seconds = min(seconds, MAX_EXCESS * self._mean_s)
            self._mean_s += max(STEP_WEIGHT, 1 / (self._num_calls - 1)) * (seconds - self._mean_s)

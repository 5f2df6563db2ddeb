"""Seconds of steps, with drafts and without: the model's measured at start, corrected by what steps took."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

STEP_WEIGHT = 0.1
"""Least weight of the last step in means of step times; the first ones weigh alike."""
MAX_EXCESS = 2.0
"""Longer steps count as this many times what was expected: the machine had other work."""
EXCESS_DECAY = 0.97
"""Factor of the steps with drafts that `_Excess` was fitted to, each step."""
FADE = 0.98
"""The same, each step without drafts, down to the weight of one: a trial then counts as much."""
ORIGIN_WEIGHT = 0.1
"""Weight, in steps, of no excess without rows: one size seen says that it is in proportion to rows."""


class StepCost:
    """Seconds from one step's tokens to the next one's, by rows and drafts. Steps without drafts overlap."""

    def __init__(self, rows: Seq[int], seconds: Seq[float]):
        """`seconds` of a forward pass with each number of `rows`, ascending."""
        self._forward: np.ndarray = np.interp(np.arange(rows[-1] + 1), rows, seconds)  # by rows
        self._overhead_s = 0.0
        self._plain: dict[int, tuple[float, int]] = {}  # seconds of steps without drafts and their number, by rows
        self._excess = _Excess()

    def plain_s(self, num_rows: int) -> float:
        seen = self._plain.get(num_rows)
        return float(self._forward_s(num_rows)) + self._overhead_s if seen is None else seen[0]

    def hoped_s(self, num_rows: int, num_drafts: np.ndarray) -> np.ndarray:
        """Return `drafted_s` as if drafts added the forward pass of their rows alone."""
        added_s = self._forward_s(num_rows + num_drafts) - self._forward_s(num_rows)
        return np.asarray(self.plain_s(num_rows) + added_s)

    def drafted_s(self, num_rows: int, num_drafts: np.ndarray) -> np.ndarray:
        """Return float64[n], seconds of `num_rows` with each of these int64[n] numbers of drafts."""
        return np.asarray(self.hoped_s(num_rows, num_drafts) + self._excess.of(num_rows + num_drafts))

    def excess_s(self, num_rows: int) -> float:
        """Return what `drafted_s` adds to `hoped_s` for this many rows in all."""
        return float(self._excess.of(np.array([num_rows]))[0])

    def on_step(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn from a step of decodes, each one row and its drafts."""
        plain_s = self.plain_s(num_rows)
        if num_drafts:
            drafts = np.array([num_drafts])
            seconds = min(seconds, MAX_EXCESS * float(self.drafted_s(num_rows, drafts)[0]))
            self._excess.add(num_rows + num_drafts, seconds - float(self.hoped_s(num_rows, drafts)[0]))
            return
        self._excess.fade()
        count = self._plain[num_rows][1] if num_rows in self._plain else 0
        if count:
            seconds = min(seconds, MAX_EXCESS * plain_s)
        mean_s = plain_s + max(STEP_WEIGHT, 1 / (count + 1)) * (seconds - plain_s)
        self._plain[num_rows] = mean_s, count + 1
        excess_s = seconds - float(self._forward_s(num_rows)) - self._overhead_s
        self._overhead_s = max(0.0, self._overhead_s + STEP_WEIGHT * excess_s)

    def _forward_s(self, num_rows: int | np.ndarray) -> np.ndarray:
        """Return the measured times; beyond the largest size each row adds the mean of a row."""
        largest = len(self._forward) - 1
        forward: np.ndarray = self._forward[np.minimum(num_rows, largest)] * np.maximum(1.0, num_rows / largest)
        return forward


class _Excess:
    """Line of seconds over rows, at least 0: what drafts add beyond the forward pass (the host's part, which nothing
    hides, and attention)."""

    def __init__(self) -> None:
        self._sums = np.array([ORIGIN_WEIGHT, 0.0, 0.0, 0.0, 0.0])
        """Sums of weights, rows, their squares, seconds, and rows times seconds."""

    def of(self, num_rows: np.ndarray) -> np.ndarray:
        weight, x, xx, y, xy = self._sums.tolist()
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 0 else 0.0
        line: np.ndarray = np.maximum(0.0, (y - slope * x) / weight + slope * num_rows)
        return line

    def fade(self) -> None:
        if self._sums[0] > 1:
            self._sums *= FADE

    def add(self, num_rows: int, seconds: float) -> None:
        self._sums *= EXCESS_DECAY
        self._sums += np.array([1.0, num_rows, num_rows**2, seconds, num_rows * seconds])
        self._sums[0] += (1 - EXCESS_DECAY) * ORIGIN_WEIGHT

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKEN_BUCKETS = tuple(1 << power for power in (0, *range(3, 15)))
"""vLLM's buckets."""


class Buckets:
    """Histogram written by one thread. `values`: a count per upper bound, the count above them, the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.values = [0.0] * (len(bounds) + 2)
        self._bounds = bounds

    def observe(self, value: float) -> None:
        self.values[bisect_left(self._bounds, value)] += 1
        self.values[-1] += value

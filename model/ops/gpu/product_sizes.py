"""Row counts for which cuBLASLt products are planned; other counts use the next larger plan.

Planning takes 0.5 ms and loading a kernel 4 to 14 ms: too long for the first step of a size.
"""

from __future__ import annotations

import functools

_STEPS, _LARGEST_STEP = ((7, 1), (128, 8), (544, 16), (2048, 64)), 512
"""(most rows, step) of each range, then the step beyond; includes captured sizes."""


@functools.cache
def planned_rows(rows: int) -> int:
    """Return the planned row count, at least `rows`."""
    step = next((step for last, step in _STEPS if rows <= last), _LARGEST_STEP)
    return -(-rows // step) * step


def all_planned_rows(most: int) -> list[int]:
    return sorted({planned_rows(rows) for rows in range(1, most + 1)})

"""Which numbers of rows cuBLASLt's products are planned for.

To plan one takes it half a millisecond, and to load a kernel that no other number of rows has needed 4 to 14: too long
for a step that meets its size for the first time. So numbers in between take the algorithms of the next planned one.
"""

from __future__ import annotations

import functools

_STEPS, _LARGEST_STEP = ((7, 1), (128, 8), (544, 16), (2048, 64)), 512
"""(up to so many rows, in steps of so many), and beyond; the sizes of captured steps are among them."""


@functools.cache
def planned_rows(rows: int) -> int:
    """Whose algorithms products of so many rows take: at least as many."""
    step = next((step for last, step in _STEPS if rows <= last), _LARGEST_STEP)
    return -(-rows // step) * step


def all_planned_rows(most: int) -> list[int]:
    """Those of all numbers up to `most`."""
    return sorted({planned_rows(rows) for rows in range(1, most + 1)})

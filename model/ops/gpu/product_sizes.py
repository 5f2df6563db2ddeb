"""The numbers of rows that cuBLASLt's products are planned for; others take the algorithms of the next larger one.

A plan takes 0.5 ms and loading its kernel 4 to 14 ms: too long for the first step of a size.
"""

from __future__ import annotations

import functools

_STEPS, _LARGEST_STEP = ((7, 1), (128, 8), (544, 16), (2048, 64)), 512
"""(largest number of rows, step), and the step beyond; the sizes of captured steps are among them."""


@functools.cache
def planned_rows(rows: int) -> int:
    """Return the planned number whose algorithms products of `rows` rows take: at least `rows`."""
    step = next((step for last, step in _STEPS if rows <= last), _LARGEST_STEP)
    return -(-rows // step) * step


def all_planned_rows(most: int) -> list[int]:
    """Return the planned numbers of all numbers of rows up to `most`."""
    return sorted({planned_rows(rows) for rows in range(1, most + 1)})

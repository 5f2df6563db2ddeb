"""Max-min fair share, as `claim.lua` computes it."""

from __future__ import annotations

from collections.abc import Iterable


def fair_share(total: int, demands: Iterable[int]) -> int:
    """Return the max-min fair share, at least 1. Demands below it are met in full."""
    left, ordered = total, sorted(demands)
    for i, demand in enumerate(ordered):
        share = left // (len(ordered) - i)
        if demand > share:
            return max(1, share)
        left -= demand
    return max(1, total)

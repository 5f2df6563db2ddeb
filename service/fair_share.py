"""What a tenant may count on of a thing that several want. What it holds beyond is lent to it, until another asks."""

from __future__ import annotations

from collections.abc import Iterable


def fair_share(num_in_all: int, wanted: Iterable[int]) -> int:
    """The most that one may have for certain, where each wants so many: who wants less has what it wants, and what that
    leaves is the others' in equal parts. At least 1. `claim.lua` reckons alike."""
    left, wants = num_in_all, sorted(wanted)
    for place, want in enumerate(wants):
        share = left // (len(wants) - place)
        if want > share:
            return max(1, share)
        left -= want
    return max(1, num_in_all)

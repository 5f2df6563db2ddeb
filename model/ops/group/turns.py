"""The ranks of a group in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar


class Selectable(Protocol):
    def use(self) -> None: ...


Rank = TypeVar("Rank", bound=Selectable)


def in_turn(ranks: Sequence[Rank]) -> Iterator[tuple[int, Rank]]:
    """Yield each rank, with its device as the thread's current one. Afterwards that is rank 0's, which drafts."""
    for number, rank in enumerate(ranks):
        rank.use()
        yield number, rank
    ranks[0].use()

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, overload

from service.engine.sequence import Sequence

MAX_DRAFTS = 16
"""Maximum draft tokens per sequence and step."""

GRAMMAR, NGRAM, SUFFIX, EAGLE3, DRAFT_MODEL = SOURCES = ("grammar", "ngram", "suffix", "eagle3", "draft_model")


class Drafter(Protocol):
    @property
    def source(self) -> str:
        """One of SOURCES."""

    @property
    def writes_cache(self) -> bool:
        """True if drafting writes the cache at the drafts' positions, so that blocks are allocated first."""

    @property
    def token_s(self) -> float:
        """Seconds to draft one more token for all sequences."""

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> Seq[Seq[int]]:
        """Return at most `max_tokens` likely next tokens of each sequence. All ids of the sequences are known."""

    def on_end(self, sequence: Sequence) -> None:
        """Drop an ended sequence's state."""


class LateDrafts(Seq[int]):
    """Draft tokens in `rows` of the runner's `sampled`, possibly not yet on the host. Reading one waits."""

    __slots__ = ("_read", "rows")

    def __init__(self, rows: Seq[int], read: Callable[[], Seq[int]]):
        """`read` returns the tokens in `rows`."""
        self.rows, self._read = rows, read

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> LateDrafts: ...
    def __getitem__(self, index: int | slice) -> int | LateDrafts:
        if isinstance(index, slice):
            read = self._read
            return LateDrafts(self.rows[index], lambda: read()[index])
        return self._read()[index]

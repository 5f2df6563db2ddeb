from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from service.engine.sequence import Sequence

MAX_DRAFTS = 16
"""Draft tokens of a sequence in a step."""

GRAMMAR, NGRAM, SUFFIX, EAGLE3, DRAFT_MODEL = SOURCES = ("grammar", "ngram", "suffix", "eagle3", "draft_model")


class Drafter(Protocol):
    @property
    def source(self) -> str:
        """One of SOURCES."""

    @property
    def writes_cache(self) -> bool:
        """True if it writes the cache where the drafts will lie: blocks come first."""

    @property
    def token_s(self) -> float:
        """Seconds to draft one more token for all sequences."""

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> Seq[Seq[int]]:
        """Return at most `max_tokens` likely next tokens of each sequence, whose ids are all known."""

    def on_end(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""

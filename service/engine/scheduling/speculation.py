"""Decodes with draft tokens, which the step verifies."""

from __future__ import annotations

from typing import Protocol

from service.engine.kv.kv_manager import KVManager
from service.engine.sequence import Sequence
from service.engine.step import Chunk


class Drafter(Protocol):
    def draft(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """Return at most `max_tokens` likely next tokens; all ids are known."""


class Speculation:
    """Drafts follow known tokens: no sequence runs ahead."""

    def __init__(self, kv: KVManager, drafter: Drafter):
        self._kv = kv
        self._drafter = drafter

    def add_drafts(self, chunks: list[Chunk], max_tokens: int) -> list[Chunk]:
        """Add at most `max_tokens` drafts, as blocks allow."""
        drafted = []
        for chunk in chunks:
            sequence = chunk.sequence
            drafts = self._drafts(sequence, max_tokens)
            end = chunk.end + len(drafts)
            if drafts and self._kv.num_missing_blocks(sequence, end) <= self._kv.pool.num_available:
                self._kv.extend(sequence, end)
                max_tokens -= len(drafts)
                chunk = chunk._replace(length=1 + len(drafts), drafts=drafts)
            drafted.append(chunk)
        return drafted

    def _drafts(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        # Penalties and grammars need the preceding rows' tokens; beams and forks have several samplers.
        is_alone = sequence.samplers == (sequence,) and not sequence.prefix_followers
        if sequence.needs_previous_tokens or sequence.cannot_run_ahead or not is_alone:
            return ()
        max_tokens = min(max_tokens, sequence.max_num_tokens - sequence.num_tokens - 1)
        return self._drafter.draft(sequence, max_tokens) if max_tokens > 0 else ()

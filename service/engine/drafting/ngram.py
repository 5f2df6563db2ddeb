"""Prompt lookup: a sequence's last tokens have occurred in it before, and go on as they did then."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from service.engine.drafting.drafter import NGRAM
from service.engine.sequence import Sequence

ID_BYTES = 4


class NgramDrafter:
    source, writes_cache, token_s = NGRAM, False, 0.0

    def __init__(self, min_tokens: int, max_tokens: int):
        """Look for the last `max_tokens` tokens, then for fewer, down to `min_tokens`."""
        self._lengths = range(max_tokens, min_tokens - 1, -1)

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[tuple[int, ...]]:
        return [self._draft(one, count) for one, count in zip(sequences, max_tokens, strict=True)]

    def on_end(self, sequence: Sequence) -> None:
        """Keep nothing."""

    def _draft(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        known = sequence.token_ids.tobytes()
        for length in self._lengths:
            start = rfind_tokens(known, length)
            if start is not None:
                return repeated(sequence, start + length, count)
        return ()


def rfind_tokens(known: bytes, length: int) -> int | None:
    """Return the position of the last earlier occurrence of the last `length` tokens of uint32 `known`, or None."""
    pattern, end = known[-length * ID_BYTES :], len(known) - ID_BYTES
    if len(known) <= len(pattern):
        return None
    at = known.rfind(pattern, 0, end)
    while at % ID_BYTES and at > 0:  # across two tokens' bytes
        at = known.rfind(pattern, 0, at + len(pattern) - 1)
    return None if at < 0 else at // ID_BYTES


def repeated(sequence: Sequence, start: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from `start` on, the sequence's end being followed by that start again."""
    tokens = sequence.token_ids[start : start + count].tolist()
    period = len(tokens)
    return tuple(tokens[index % period] for index in range(count)) if period else ()

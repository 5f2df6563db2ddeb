"""Prompt lookup: find earlier occurrences of a sequence's last tokens in it, and draft what followed them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from service.engine.drafting.drafter import NGRAM
from service.engine.sequence import Sequence

MAX_LENGTHS = 4
"""Run lengths to look up."""
FACTOR = 0x9E3779B97F4A7C15
"""Multiplier of the rolling hash of a token run: odd, with well-mixed bits."""
MASK = (1 << 64) - 1
ARRAY_TOKENS = 32
"""Longer runs of new tokens are hashed as an array."""


class NgramDrafter:
    source, writes_cache, token_s = NGRAM, False, 0.0

    def __init__(self, min_tokens: int, max_tokens: int):
        """Look up the last `max_tokens` tokens, then fewer, down to `min_tokens`."""
        self._lengths = lookup_lengths(min_tokens, max_tokens)
        self._indexes: dict[Sequence, TokenIndex] = {}

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[tuple[int, ...]]:
        return [self._draft(one, count) for one, count in zip(sequences, max_tokens, strict=True)]

    def on_end(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)

    def _draft(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = TokenIndex(self._lengths)
        start = index.find(sequence)
        return () if start is None else repeated(sequence, start, count)


def lookup_lengths(shortest: int, longest: int) -> tuple[int, ...]:
    """Return at most MAX_LENGTHS lengths, longest first, evenly spaced by ratio if there are more."""
    if longest - shortest < MAX_LENGTHS:
        return tuple(range(longest, shortest - 1, -1))
    return tuple(dict.fromkeys(np.geomspace(longest, shortest, MAX_LENGTHS).round().astype(int).tolist()))


class TokenIndex:
    """Ends of the latest token runs in one sequence, by length and hash. A hash collision only yields a wrong draft."""

    def __init__(self, lengths: Seq[int]):
        """`lengths`: run lengths, longest first."""
        self._num_tokens = 0
        self._runs = [_Runs(length) for length in lengths]

    def find(self, sequence: Sequence) -> int | None:
        """Return where the longest run that ends the sequence last ended before, or None."""
        tokens, num_known = sequence.token_ids, self._num_tokens
        self._num_tokens = len(tokens)
        if len(tokens) - num_known > ARRAY_TOKENS:
            known = np.frombuffer(tokens[: len(tokens)], np.uint32).astype(np.uint64)
            for runs in self._runs:
                runs.add_array(known)
        else:
            for end in range(num_known + 1, len(tokens) + 1):
                token = tokens[end - 1]
                for runs in self._runs:
                    runs.add(token, tokens[end - 1 - runs.length] if end > runs.length else 0, end)
        for runs in self._runs:
            if runs.last is not None:
                return runs.last
        return None


class _Runs:
    __slots__ = ("_ends", "_hash", "_oldest_factor", "last", "length")

    def __init__(self, length: int):
        self.length = length
        self.last: int | None = None
        """End of the previous occurrence of the last run, or None."""
        self._ends: dict[int, int] = {}
        self._hash = 0  # of the last run
        self._oldest_factor = pow(FACTOR, length, MASK + 1)

    def add(self, token: int, oldest: int, end: int) -> None:
        """Add a token; `oldest` leaves the run."""
        self._hash = key = (self._hash * FACTOR + token - oldest * self._oldest_factor) & MASK
        if end >= self.length:
            self.last = self._ends.get(key)
            self._ends[key] = end

    def add_array(self, tokens: np.ndarray) -> None:
        """Rebuild the index from all tokens uint64[n]."""
        self._hash = 0
        if len(tokens) < self.length:
            for end, token in enumerate(tokens.tolist(), 1):
                self.add(token, 0, end)
            return
        num_runs = len(tokens) - self.length + 1
        hashes = np.zeros(num_runs, np.uint64)
        for offset in range(self.length):
            hashes = hashes * np.uint64(FACTOR) + tokens[offset : offset + num_runs]
        *keys, self._hash = hashes.tolist()
        self._ends = dict(zip(keys, range(self.length, len(tokens)), strict=True))
        self.last = self._ends.get(self._hash)
        self._ends[self._hash] = len(tokens)


def repeated(sequence: Sequence, start: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from `start` on; past the sequence's end, continue at `start` again."""
    tokens = tuple(sequence.token_ids[start : start + count])
    return tokens if len(tokens) == count else (tokens * count)[:count]
